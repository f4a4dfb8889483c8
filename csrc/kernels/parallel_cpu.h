// When a CPU kernel is worth a second thread.
#pragma once
#include <cstdint>

namespace ftbert {

// Elements that one thread is done with in about 10 us. Waking another takes 5 to 70 us, by what the process's threads
// do while they wait (16 tokens through MiniLM-L6: 2.9 ms with OMP_WAIT_POLICY=active, 5.7 with passive).
inline constexpr int64_t kSerialElements = 16384;

}  // namespace ftbert
