#include "binding/stream_handle.h"

#include <dlfcn.h>

#include "core/check.h"

namespace ftbert::binding {
namespace {

// Before torch 2.11 a Stream does not tell. c10::cuda::CUDAStream, in a library that is there where a GPU is used,
// does; it has a Stream as its only member.
[[maybe_unused]] void* handle_of_cuda_stream(const c10::Stream& stream) {
  using Handle = void* (*)(const c10::Stream*);
  static const auto handle = [] {
    void* const library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Handle>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv")) : nullptr;
  }();
  FTBERT_CHECK(handle, "this build of torch has no CUDA streams that ftbert could find");
  return handle(&stream);
}

template <class Stream>
void* handle_of(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); })
    return stream.native_handle();
  else
    return handle_of_cuda_stream(stream);
}

}  // namespace

void* native_handle(const c10::Stream& stream) { return handle_of(stream); }

}  // namespace ftbert::binding
