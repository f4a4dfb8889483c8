// Who computes which sequences: a GPU all at once; a CPU in runs that fit its cache, by all threads together or by each
// thread alone.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/context.h"
#include "layers/batch.h"

namespace ftbert {

struct Schedule {
  std::vector<Run> together;            // of all sequences, one after the other
  std::vector<std::vector<Run>> alone;  // by thread, each with sequences of its own; empty: threads share the work

  // Of the largest run.
  static int64_t most_tokens(const std::vector<Run>& runs);
};

Schedule make_schedule(const Context<Cpu>& context, const Sequences& sequences, bool may_work_alone);
Schedule make_schedule(const Context<Cuda>& context, const Sequences& sequences, bool may_work_alone);

// work(a context of its own, i) for each i < count: on the CPU at once, each on a thread; on a GPU one after the other.
void each_alone(Context<Cpu>& context, int64_t count, const std::function<void(Context<Cpu>&, int64_t i)>& work);
void each_alone(Context<Cuda>& context, int64_t count, const std::function<void(Context<Cuda>&, int64_t i)>& work);

}  // namespace ftbert
