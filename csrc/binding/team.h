// How the threads of calls on the CPU wait for each other.
#pragma once
#include <map>
#include <optional>
#include <string>

#include "binding/visible.h"

namespace ftbert::binding {

// Lives while this thread computes a call on the CPU. The outermost one of a thread reads, every 50 ms at most, for how
// long the threads of its parallel regions waited for a core (Linux, /proc/self/task/<thread>/schedstat). While others
// keep the cores busy (core/crowding.h) all threads of OpenMP in this process, torch's and oneDNN's too, sleep where
// they wait for each other, instead of spinning. A forked child has one thread (binding/forked.h).
class FTBERT_VISIBLE Team {
 public:
  // measures: false where a GPU waits for what the CPU does, which then takes no thread that it need not take.
  explicit Team(bool measures = true);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team();
};

// on: whether calls do that; threads spin until they have measured. crowded: as if that had been measured; without it
// by how the calling thread fared until this. False where it cannot be done: the system does not say for how long
// threads wait, or OpenMP's runtime is not GCC's.
bool follow_busy_cores(bool on, std::optional<bool> crowded);

// "followed": whether calls measure; "crowded": whether cores were busy.
std::map<std::string, bool> busy_cores();

}  // namespace ftbert::binding
