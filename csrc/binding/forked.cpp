#include "binding/forked.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <omp.h>
#include <pthread.h>

#include <atomic>

namespace ftbert::binding {
namespace {

std::atomic<bool> is_child{false};
std::atomic<bool> warned{false};

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  is_child.store(true, std::memory_order_relaxed);
  warned.store(false, std::memory_order_relaxed);
});

}  // namespace

void one_thread_if_forked() {
  if (!is_child.load(std::memory_order_relaxed)) [[likely]]
    return;
  const int threads = at::get_num_threads();
  if (threads == 1 && omp_get_max_threads() == 1) return;
  at::set_num_threads(1);  // oneDNN's and MKL's too
  omp_set_num_threads(1);  // of the OpenMP that this library is linked to, should that be another one
  if (threads == 1 || warned.exchange(true)) return;  // ftbert/forked.py has said it
  TORCH_WARN("ftbert: this process was forked from one that had imported ftbert, whose ", threads,
             " threads stayed there: it computes on one. Start workers by \"spawn\" or \"forkserver\" to let each "
             "have threads of its own");
}

}  // namespace ftbert::binding
