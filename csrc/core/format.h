// How a matrix, or an edge between two kernels, is stored: one row of a table for each format. Weights, the loader, the
// checks, the kernels' `supports` and Python read the table; a format is compared by its address.
#pragma once
#include <climits>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/types.h"

namespace ftbert {

// Format::block of formats whose scales are not of neighbours in a row.
inline constexpr int kNoScales = 0, kWholeRow = -1, kWholeMatrix = -2;

// A number is (what is stored - its minimum, where there are minima) * its scale.
struct Format {
  std::string_view name;        // in configs, tables of products and messages
  DType numbers = DType::fp32;  // their type in memory
  int bits = 32;                // of a number
  int block = kNoScales;        // how many numbers of a row share a scale, or which of them
  DType scales = DType::fp32;   // their type
  bool minima = false;          // beside each scale lies a minimum, of as many bits
  bool inside = false;          // scales lie in the numbers' memory; else in memory of their own
  bool in_checkpoints = false;  // configs name it, as the type of a matrix
  // How the other operand of a product by such a matrix is stored; nullptr: in the residual stream's type.
  const Format* other = nullptr;
  // Matrices [rows, columns] that products read: multiples of these, and limits of columns.
  int rows_of = 1, columns_of = 1;
  int64_t least_columns = 1, most_columns = INT64_MAX;
  int64_t least_on_gpus = 1;  // columns, and of rows and columns a multiple, where a GPU's products ask for more
  int step_on_gpus = 1;
  // The first compute capability of GPUs whose products read them, 10 * major + minor. Of CPUs: gemm/cpu/kernel.h.
  int first_gpu = INT_MAX;

  // Bytes of a matrix; of scales those that lie inside.
  int64_t bytes(int64_t rows, int64_t columns) const;
  // What a GPU's or a CPU's products expect of a matrix of another size, "multiples of 8 and 64"; "" where they read
  // this one.
  std::string other_size(int64_t rows, int64_t columns, bool gpu) const;
};

namespace formats {
extern const Format fp32, fp16, bf16;
extern const Format e4m3;         // with a scale for each row
extern const Format e4m3_tensor;  // with one scale
extern const Format int8;         // with a scale for each row
extern const Format byte_rows;    // uint8, see byte_row_bytes
extern const Format q8_0;         // int8 in blocks of 32 with a scale in fp16 each, as llama.cpp's Q8_0
}  // namespace formats

template <class T>
inline constexpr const Format* kFormat = &formats::fp32;
template <>
inline constexpr const Format* kFormat<half_t> = &formats::fp16;
template <>
inline constexpr const Format* kFormat<bfloat16_t> = &formats::bf16;

std::span<const Format* const> all_formats();
// By name; Error lists the names, of all formats or of those without scales.
const Format& parse_format(std::string_view name, bool with_scales = true);
DType parse_dtype(std::string_view name);  // of a format without scales: fp32, fp16, bf16
const Format& plain_format(DType dtype);   // without scales; Error for another type

// ---- byte rows: the other operand of int8 products ----------------------------------------------------------------

// From row to row: `cols` bytes, zeros up to the last 8 bytes, then the scale (float) and the zero point (int32). Rows
// are whole cache lines. A number is (byte - zero point) * scale.
FTBERT_HOST_DEVICE constexpr int64_t byte_row_bytes(int64_t cols) { return (cols + 8 + 63) / 64 * 64; }

// ---- q8_0 ----------------------------------------------------------------------------------------------------------

inline constexpr int64_t kQ8Block = 32;  // numbers of a scale

// On a GPU a matrix [n, k], n a multiple of kQ8TileRows and k of kQ8TileDepth, is one piece of memory, read 16 bytes a
// lane as the operand of mma.m16n8k32 is held:
//   int8 [n / 8][k / 64][lane 32][16]: lane = 4 g + t has of row g of the tile the bytes [h 2][j 2][b 4], which are
//     columns 32 h + 16 j + 4 t + b of the step of 64;
//   behind all of them the scales, fp16 [n / 8][k / 64][h 2][g 8].
inline constexpr int64_t kQ8TileRows = 8, kQ8TileDepth = 64;
FTBERT_HOST_DEVICE const half_t* q8_0_scales(const void* data, int64_t n, int64_t k) {
  return reinterpret_cast<const half_t*>(static_cast<const int8_t*>(data) + n * k);
}

// ---- int8 ----------------------------------------------------------------------------------------------------------

// Columns of a product in int8: sums of uint8 * int8 are exact in int32.
inline constexpr int64_t kMostInt8Depth = (int64_t{1} << 31) / (255 * 128);

// On a GPU a matrix [n, k] is one piece of memory: rows of int8, zeros behind each up to a multiple of 16 bytes, then
// the sums of the rows, int32 [n], n a multiple of 4.
FTBERT_HOST_DEVICE constexpr int64_t int8_row_bytes(int64_t k) { return (k + 15) / 16 * 16; }
constexpr int64_t int8_gpu_bytes(int64_t n, int64_t k) {
  return n * (int8_row_bytes(k) + static_cast<int64_t>(sizeof(int32_t)));
}
FTBERT_HOST_DEVICE const int32_t* int8_row_sums(const void* data, int64_t n, int64_t k) {
  return reinterpret_cast<const int32_t*>(static_cast<const int8_t*>(data) + n * int8_row_bytes(k));
}

}  // namespace ftbert
