// The binding's functions are hidden in their library but for these, which the library of test ops (tests/ops/) calls.
#pragma once

#define FTBERT_VISIBLE [[gnu::visibility("default")]]
