// Loads a scripted ftbert model through LibTorch and prints the hidden state of the first token of a fixed input.
//   run_scripted path/to/libftbert_torch-2.13.so path/to/model.pt      of the same release as LibTorch
#include <dlfcn.h>
#include <torch/script.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s libftbert_torch-RELEASE.so model.pt\n", argv[0]);
    return 2;
  }
  // Loading the library registers torch.classes.ftbert.Encoder, which the file needs.
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    torch::jit::Module model = torch::jit::load(argv[2]);
    const torch::Tensor ids = torch::tensor({{11, 12, 13, 14, 15, 0, 0}, {21, 22, 23, 24, 25, 26, 27}}, torch::kLong);
    const torch::Tensor mask = (ids != 0).to(torch::kLong);
    const torch::Tensor hidden = model.forward({ids, mask}).toTuple()->elements()[0].toTensor();
    const torch::Tensor first = hidden[0][0].contiguous().cpu().to(torch::kFloat);
    for (int64_t i = 0; i < first.numel(); ++i) std::printf("%.9g\n", first.data_ptr<float>()[i]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
