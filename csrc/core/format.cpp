#include "core/format.h"

#include <algorithm>

#include "core/check.h"

namespace ftbert {
namespace formats {

constexpr int kAnyGpu = 0, kAmpere = 80, kAda = 89;

const Format fp32{.name = "fp32", .other = &fp32, .first_gpu = kAnyGpu};
const Format fp16{.name = "fp16", .numbers = DType::fp16, .bits = 16, .other = &fp16, .first_gpu = kAnyGpu};
const Format bf16{.name = "bf16", .numbers = DType::bf16, .bits = 16, .other = &bf16, .first_gpu = kAmpere};
constexpr Format in_e4m3(std::string_view name, int block) {
  return {.name = name,
          .numbers = DType::e4m3,
          .bits = 8,
          .block = block,
          .in_checkpoints = block == kWholeRow,
          .other = &e4m3_tensor,
          .rows_of = 16,
          .columns_of = 16,
          .first_gpu = kAda};
}
const Format e4m3 = in_e4m3("e4m3", kWholeRow), e4m3_tensor = in_e4m3("e4m3_tensor", kWholeMatrix);
const Format int8{.name = "int8",
                  .numbers = DType::int8,
                  .bits = 8,
                  .block = kWholeRow,
                  .in_checkpoints = true,
                  .other = &byte_rows,
                  .least_columns = 16,  // a byte row takes the place of as many floats
                  .most_columns = kMostInt8Depth,
                  .least_on_gpus = 32,  // of 16-bit numbers
                  .step_on_gpus = 8,
                  .first_gpu = kAmpere};
const Format byte_rows{
    .name = "byte_rows", .numbers = DType::uint8, .bits = 8, .block = kWholeRow, .minima = true, .inside = true};
const Format q8_0{.name = "q8_0",
                  .numbers = DType::int8,
                  .bits = 8,
                  .block = kQ8Block,
                  .scales = DType::fp16,
                  .inside = true,
                  .in_checkpoints = true,
                  .rows_of = kQ8TileRows,
                  .columns_of = kQ8TileDepth,
                  .first_gpu = kAmpere};

}  // namespace formats

int64_t Format::bytes(int64_t rows, int64_t columns) const {
  constexpr int64_t kLine = 64;  // where the scale of a whole row lies inside, rows are whole cache lines
  const int64_t numbers = columns * bits / 8, scale = (minima ? 2 : 1) * bytes_of(scales);
  if (!inside) return rows * numbers;
  if (block > 0) return rows * (numbers + columns / block * scale);
  return rows * ((numbers + scale + kLine - 1) / kLine * kLine);
}

std::string Format::other_size(int64_t rows, int64_t columns, bool gpu) const {
  const int of_rows = gpu ? std::max(rows_of, step_on_gpus) : rows_of;
  const int of_columns = gpu ? std::max(columns_of, step_on_gpus) : columns_of;
  const int64_t least = gpu ? std::max(least_columns, least_on_gpus) : least_columns;
  if (rows % of_rows != 0 || columns % of_columns != 0)
    return "multiples of " + std::to_string(of_rows) +
           (of_columns == of_rows ? "" : " and " + std::to_string(of_columns));
  if (columns >= least && columns <= most_columns) return "";
  return std::to_string(least) + " to " + std::to_string(most_columns) + " columns";
}

std::span<const Format* const> all_formats() {
  using namespace formats;
  static constexpr const Format* kAll[] = {&fp32, &fp16, &bf16, &e4m3, &e4m3_tensor, &int8, &byte_rows, &q8_0};
  return kAll;
}

const Format& parse_format(std::string_view name, bool with_scales) {
  std::string known;
  for (const Format* format : all_formats()) {
    if (format->block != kNoScales && !with_scales) continue;
    if (format->name == name) return *format;
    known += (known.empty() ? "" : ", ") + std::string(format->name);
  }
  fail("unknown dtype '", name, "'; supported: ", known);
}

DType parse_dtype(std::string_view name) { return parse_format(name, false).numbers; }

const Format& plain_format(DType dtype) {
  for (const Format* format : all_formats())
    if (format->numbers == dtype && format->block == kNoScales) return *format;
  fail(to_string(dtype), " is no format without scales");
}

}  // namespace ftbert
