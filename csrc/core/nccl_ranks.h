// The other make_rank_group of GPUs, of a build with CUDA.
#pragma once
#include <memory>
#include <vector>

#include "core/rank_group.h"

namespace ftbert {

// Sums through NCCL. Error where it is not there.
std::unique_ptr<RankGroup<Cuda>> make_nccl_ranks(const std::vector<int>& devices);

}  // namespace ftbert
