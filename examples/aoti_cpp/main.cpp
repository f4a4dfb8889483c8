// Runs a model that AOTInductor packaged, without Python, on batches of any size and length.
//   run_package path/to/libftbert_torch-2.13.so path/to/model.pt2 < ids      the library of LibTorch's release
// Each line of the input holds the token ids of one text, an empty line ends a batch. For each text a line comes back:
// the first output's row of its first token.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Texts = std::vector<std::vector<int64_t>>;

// The texts up to an empty line or the end.
Texts read_batch(std::istream& in) {
  Texts texts;
  for (std::string line; std::getline(in, line) && !line.empty();) {
    std::istringstream words(line);
    texts.emplace_back();
    for (int64_t id; words >> id;) texts.back().push_back(id);
  }
  return texts;
}

// Token ids and attention mask, int64 [batch, seq], 0 at padding.
std::vector<at::Tensor> padded(const Texts& texts) {
  size_t longest = 1;
  for (const auto& text : texts) longest = std::max(longest, text.size());
  const at::Tensor ids = at::zeros({int64_t(texts.size()), int64_t(longest)}, at::kLong), mask = at::zeros_like(ids);
  for (size_t i = 0; i < texts.size(); ++i) {
    std::copy(texts[i].begin(), texts[i].end(), ids[i].data_ptr<int64_t>());
    mask[i].narrow(0, 0, texts[i].size()).fill_(1);
  }
  return {ids, mask};
}

void print_rows(const at::Tensor& hidden) {
  const at::Tensor first = hidden.select(1, 0).to(at::kCPU, at::kFloat).contiguous();
  for (int64_t i = 0; i < first.size(0); ++i)
    for (int64_t j = 0; j < first.size(1); ++j)
      std::printf("%.9g%c", first.data_ptr<float>()[i * first.size(1) + j], j + 1 < first.size(1) ? ' ' : '\n');
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s libftbert_torch-RELEASE.so model.pt2 < ids\n", argv[0]);
    return 2;
  }
  // Loading the library registers torch.ops.ftbert and torch.classes.ftbert.Encoder, which the package needs.
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    const c10::InferenceMode no_gradients;
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    const at::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));  // cpu or cuda, where it was compiled for
    for (Texts texts = read_batch(std::cin); !texts.empty(); texts = read_batch(std::cin)) {
      std::vector<at::Tensor> inputs = padded(texts);
      for (at::Tensor& input : inputs) input = input.to(device);
      print_rows(model.run(inputs)[0]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
