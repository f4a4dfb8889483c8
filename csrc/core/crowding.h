// Whether others keep the cores busy that a team of threads computes on.
#pragma once
#include <vector>

namespace ftbert {

// Of a thread over a span of time: its seconds on a core, its seconds ready to run without a core, and how often it got
// a core.
struct ThreadTime {
  double ran, waited, turns;
};

// Threads of a team wait for each other at every kernel. Where cores are free they best spin meanwhile; where they are
// not, who spins uses up the time that it will need, and all wait for each other's next turn. A fourth of the team has
// to have waited for cores, twice in a row; that it did not any more has to last, after a try in vain twice as long.
class Crowding {
 public:
  // The share of its time that a thread waits for a core which is not its own (two on a core: 0.5), and the share below
  // which cores are free.
  static constexpr double kCrowded = 0.3, kFree = 0.1;
  // Seconds until a thread that was woken has a free core, which is no waiting for others.
  static constexpr double kWaking = 1e-4;
  // Seconds of free cores before they count as free. What is crowded again within kTried seconds was tried in vain.
  static constexpr double kLeastPatience = 0.25, kMostPatience = 8, kTried = 2;

  explicit Crowding(bool crowded = false) : crowded_(crowded) {}

  bool crowded() const { return crowded_; }

  // Whether so many of the threads waited for cores.
  static bool crowds(const std::vector<ThreadTime>& team);

  // now: seconds, of a clock that only grows. team: of every thread of it since it was looked at last.
  void observe(double now, const std::vector<ThreadTime>& team);

 private:
  bool crowded_, suspected_ = false;
  double left_ = -kTried, patience_ = kLeastPatience;
  double free_since_ = -1;  // -1: they were not
};

}  // namespace ftbert
