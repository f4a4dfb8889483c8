#include "core/crowding.h"

#include <algorithm>

namespace ftbert {
namespace {

bool a_fourth_waited(const std::vector<ThreadTime>& team, double share) {
  const auto waited = [=](const ThreadTime& one) {
    return one.waited > share * (one.ran + one.waited) && one.waited > Crowding::kWaking * one.turns;
  };
  return 4 * std::count_if(team.begin(), team.end(), waited) >= std::max<std::ptrdiff_t>(1, std::ssize(team));
}

}  // namespace

bool Crowding::crowds(const std::vector<ThreadTime>& team) { return a_fourth_waited(team, kCrowded); }

void Crowding::observe(double now, const std::vector<ThreadTime>& team) {
  if (!crowded_) {
    const bool before = suspected_;
    suspected_ = crowds(team);
    if (!before || !suspected_) return;
    crowded_ = true;
    suspected_ = false;
    patience_ = now - left_ < kTried ? std::min(2 * patience_, kMostPatience) : kLeastPatience;
    free_since_ = -1;
  } else if (a_fourth_waited(team, kFree)) {
    free_since_ = -1;
  } else if (free_since_ < 0) {
    free_since_ = now;
  } else if (now - free_since_ >= patience_) {
    crowded_ = false;
    left_ = now;
  }
}

}  // namespace ftbert
