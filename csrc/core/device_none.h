// What every function of a GPU says in a build without CUDA.
#pragma once

namespace ftbert {

inline constexpr const char* kNoCuda = "this build of ftbert has no CUDA: rebuild with FTBERT_CUDA=ON (needs nvcc)";

}  // namespace ftbert
