#include "binding/team.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "binding/forked.h"
#include "core/crowding.h"

namespace ftbert::binding {
namespace {

// Seconds between two looks, and of the calling thread's time that one has to go by; of a thread's life at first.
constexpr double kBetween = 0.05, kLeast = 0.01, kLeastLife = 0.1;

// As GCC's OpenMP saw them when it was loaded, unless this library came much later.
const int cores = omp_get_num_procs();

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

long this_thread() { return syscall(SYS_gettid); }

// Since the thread began. nullopt: it is gone, or the kernel keeps no such times.
std::optional<ThreadTime> time_of(long thread) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%ld/schedstat", thread);
  std::FILE* const file = std::fopen(path, "re");
  if (!file) return std::nullopt;
  unsigned long long ran = 0, waited = 0, turns = 0;
  const int read = std::fscanf(file, "%llu %llu %llu", &ran, &waited, &turns);
  std::fclose(file);
  if (read != 3 || ran == 0) return std::nullopt;
  return ThreadTime{1e-9 * static_cast<double>(ran), 1e-9 * static_cast<double>(waited), static_cast<double>(turns)};
}

// More threads of OpenMP than there are cores. GCC's runtime (libgomp) then spins 100 times instead of 300,000 before a
// thread sleeps (its manual, GOMP_SPINCOUNT): the only way to tell it so behind its start. They sleep in a pool of
// their own, which goes with the thread that made it.
class Surplus {
 public:
  // team: threads that calls have; these are there already.
  void set(bool there, int team) {
    if (there == (parked_ != nullptr)) return;
    if (!there) {
      parked_->end();
      parked_.reset();
      return;
    }
    auto parked = std::make_shared<Parked>();
    try {
      std::thread([parked, size = std::max(2, cores - team + 2)] { parked->wait(size); }).detach();
    } catch (const std::system_error&) {  // no thread to be had: they spin
      return;
    }
    parked_ = std::move(parked);
  }

 private:
  struct Parked {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    std::atomic<int> began{0};

    void wait(int size) {
#pragma omp parallel num_threads(size)
      began.fetch_add(1, std::memory_order_relaxed);
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return ended; });
    }
    void end() {
      const std::lock_guard lock(mutex);
      ended = true;
      changed.notify_all();
    }
  };
  std::shared_ptr<Parked> parked_;
};

// Of the process, since the runtime's threads wait in one way. Never freed: a thread may be in a call at its end.
struct Shared {
  std::atomic<bool> followed{false};
  std::mutex mutex;  // of what follows
  Crowding crowding;
  Surplus surplus;
};

Shared& shared() {
  static Shared& one = *new Shared;
  return one;
}

struct Watched {
  long thread;
  ThreadTime until;  // since it began
};

// Of a calling thread, each of which has a pool of its own.
struct Calls {
  int depth = 0;              // Teams that live
  int size = 0;               // of what `team` holds the threads; 0: of none
  std::vector<Watched> team;  // the calling thread first
  double looked = 0;
};

Calls& my_calls() {
  thread_local Calls mine;
  return mine;
}

// The threads of a parallel region of this size; OpenMP's pool keeps them until a region has another.
std::vector<Watched> threads_of(int size) {
  std::vector<long> threads(size, 0);
#pragma omp parallel num_threads(size)
  threads[omp_get_thread_num()] = this_thread();
  std::vector<Watched> team;
  for (const long thread : threads)
    if (thread != 0) team.push_back({thread, time_of(thread).value_or(ThreadTime{})});
  return team;
}

void look(Calls& mine, int size) {
  const double now = seconds();
  if (now - mine.looked < kBetween) return;
  mine.looked = now;
  if (mine.size != size) {
    mine.team = threads_of(size);
    mine.size = size;
    return;
  }
  std::vector<ThreadTime> until, since;
  for (const Watched& one : mine.team) {
    const std::optional<ThreadTime> time = time_of(one.thread);
    if (!time || time->ran < one.until.ran) {  // gone, and its number may be another's
      mine.size = 0;
      return;
    }
    until.push_back(*time);
    since.push_back({time->ran - one.until.ran, time->waited - one.until.waited, time->turns - one.until.turns});
  }
  if (since.front().ran + since.front().waited < kLeast) return;
  for (size_t i = 0; i < until.size(); ++i) mine.team[i].until = until[i];
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  if (!all.followed) return;
  all.crowding.observe(now, since);
  all.surplus.set(all.crowding.crowded(), size);
}

}  // namespace

Team::Team(bool measures) {
  Calls& mine = my_calls();
  if (mine.depth == 0) {
    one_thread_if_forked();
    const int size = at::get_num_threads();  // which sets this thread's number, once
    if (measures && size > 1 && shared().followed && !at::in_parallel_region() && !omp_in_parallel()) look(mine, size);
  }
  ++mine.depth;
}

Team::~Team() { --my_calls().depth; }

bool follow_busy_cores(bool on, std::optional<bool> crowded) {
  const std::optional<ThreadTime> life = time_of(this_thread());
  const bool can = life && !dlsym(RTLD_DEFAULT, "kmp_set_blocktime");  // LLVM's and Intel's runtimes have that
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  all.followed = on && can;
  all.crowding =
      Crowding(all.followed && crowded.value_or(life->ran + life->waited >= kLeastLife && Crowding::crowds({*life})));
  const int size = at::get_num_threads();
  all.surplus.set(all.crowding.crowded() && size > 1, size);
  return can;
}

std::map<std::string, bool> busy_cores() {
  Shared& all = shared();
  const std::lock_guard lock(all.mutex);
  return {{"followed", all.followed}, {"crowded", all.crowding.crowded()}};
}

}  // namespace ftbert::binding
