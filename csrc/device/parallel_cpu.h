// When a CPU kernel is worth a second thread.
#pragma once
#include <cstdint>

namespace ftbert {

// Elements that one thread is done with in about 10 us. Waking another costs more, how much depends on what threads do
// while they wait: with two for every kernel and product, 16 tokens through MiniLM-L6 took 2.9 ms under
// OMP_WAIT_POLICY=active and 5.7 under passive.
inline constexpr int64_t kSerialElements = 16384;

}  // namespace ftbert
