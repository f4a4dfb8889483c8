// Products of bf16 pairs, or of fours of unsigned and signed bytes, by tiles (Intel AMX, from Sapphire Rapids on), as
// functions. A tile has 16 rows of 64 bytes: 16 by 32 bf16 of the left operand, 16 pairs of rows by 16 columns of the
// right one, 16 by 16 sums, of float or of int32.
#pragma once
// Where there are tiles there is all of AVX-512 that ftbert uses.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__AVX512VL__)
#define FTBERT_AMX
#include <immintrin.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace ftbert::FTBERT_ISA::amx {

inline constexpr int kSide = 16;  // rows, pairs or fours of depth, and columns of a tile

// The tiles of this thread, whole unless shape() says otherwise, as long as this lives. The thread's: nobody else may
// shape them meanwhile.
class Tiles {
 public:
  Tiles() { shape(2 * kSide); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // For products of so many rows, 1 to 32: no others are read or written. Tiles lose what they hold.
  void shape(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int64_t lower = rows > kSide ? rows - kSide : kSide;  // without lower rows its tiles are not used
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = kSide;
    for (int tile : {0, 1, 4}) shape.rows[tile] = static_cast<uint8_t>(rows < kSide ? rows : kSide);
    for (int tile : {2, 3, 5}) shape.rows[tile] = static_cast<uint8_t>(lower);
    asm volatile("" ::"r"(&shape) : "memory");  // GCC's next line says that it reads 8 of the 64 bytes
    _tile_loadconfig(&shape);
  }

 private:
  int64_t rows_ = 0;
};

// out [rows, columns] = a [rows, depth] @ b [depth, columns], or + out; rows those of kRowTiles tiles; depth in pairs
// (fours, for sums of int32), a multiple of 16; columns a multiple of 32; strides in elements of 4 bytes.
template <int kRowTiles, class Sum>
void multiply(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t depth, int64_t columns, Sum* out,
              int64_t ldo, bool add) {
  static_assert(kRowTiles == 1 || kRowTiles == 2);
// Tiles are named by literals.
#define FTBERT_TILE_PRODUCT(sums, left, right) \
  if constexpr (std::is_same_v<Sum, float>)    \
    _tile_dpbf16ps(sums, left, right);         \
  else                                         \
    _tile_dpbusd(sums, left, right)
  asm volatile("" ::: "memory");  // the loads below do not tell the compiler what they read
  for (int64_t c = 0; c < columns; c += 2 * kSide) {
    if (add) {
      _tile_loadd(0, out + c, ldo * 4);
      _tile_loadd(1, out + c + kSide, ldo * 4);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(2, out + kSide * ldo + c, ldo * 4);
        _tile_loadd(3, out + kSide * ldo + c + kSide, ldo * 4);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kRowTiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    for (int64_t d = 0; d < depth; d += kSide) {
      _tile_loadd(4, a + d, lda * 4);
      _tile_loadd(6, b + d * ldb + c, ldb * 4);
      _tile_loadd(7, b + d * ldb + c + kSide, ldb * 4);
      FTBERT_TILE_PRODUCT(0, 4, 6);
      FTBERT_TILE_PRODUCT(1, 4, 7);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(5, a + kSide * lda + d, lda * 4);
        FTBERT_TILE_PRODUCT(2, 5, 6);
        FTBERT_TILE_PRODUCT(3, 5, 7);
      }
    }
    _tile_stored(0, out + c, ldo * 4);
    _tile_stored(1, out + c + kSide, ldo * 4);
    if constexpr (kRowTiles == 2) {
      _tile_stored(2, out + kSide * ldo + c, ldo * 4);
      _tile_stored(3, out + kSide * ldo + c + kSide, ldo * 4);
    }
  }
#undef FTBERT_TILE_PRODUCT
  asm volatile("" ::: "memory");
}

}  // namespace ftbert::FTBERT_ISA::amx
#endif
