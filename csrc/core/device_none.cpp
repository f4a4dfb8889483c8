// What core/device.h, core/graph.h and core/rank_group.h promise, in a build without CUDA.
#include "core/check.h"
#include "core/device.h"
#include "core/graph.h"
#include "core/rank_group.h"

namespace ftbert {

std::string why_no_cuda() { return kNoCuda; }
Context<Cuda> cuda_context(int, void*) { throw Error(kNoCuda); }
std::string why_held(int) { throw Error(kNoCuda); }
void copy_on_device(const Context<Cuda>&, const void*, void*, size_t) { throw Error(kNoCuda); }
void clear_on_device(const Context<Cuda>&, void*, size_t) { throw Error(kNoCuda); }

std::unique_ptr<LaunchGraph> record_graph(const std::function<void(void*)>&) { throw Error(kNoCuda); }
bool is_recording(void*) { throw Error(kNoCuda); }
std::unique_ptr<StreamMark> make_stream_mark() { throw Error(kNoCuda); }

template <>
std::unique_ptr<RankGroup<Cuda>> make_rank_group<Cuda>(const std::vector<int>&) {
  throw Error(kNoCuda);
}

}  // namespace ftbert
