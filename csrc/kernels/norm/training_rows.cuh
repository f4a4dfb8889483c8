// What the norms of training read and write: rows and vectors, and which kernel reads which types.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "core/operand.h"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "kernels/norm/training_norms.h"

namespace ftbert {
namespace {

// ---- elements ------------------------------------------------------------------------------------------------------

// Rows of one element type, by packs of 16 bytes. start and read: of a pack on its way through shared memory.
template <class E>
struct PlainRows {
  static constexpr int kWidth = ftbert::kWidth<E>;      // elements of an access
  static constexpr bool kPlain = true, kStaged = true;  // staged: through shared memory
  E* data;

  PlainRows(const Operand& rows) : data(static_cast<E*>(rows.data)) {}
  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ void start(uint32_t slot, int64_t at, bool real) const {
    copy_async16(slot, real ? data + at : data, real);
  }
  __device__ void read(const uint4& slot, int64_t, float (&x)[kWidth]) const { Packed<E, kWidth>{slot}.to_floats(x); }
  using Pack = Packed<E, kWidth>;  // as it is stored
  __device__ Pack load(int64_t at) const { return Pack::load(data + at); }
  __device__ Pack load_once(int64_t at) const { return Pack::load_once(data + at); }
  __device__ void store(int64_t at, const float (&x)[kWidth]) const { Pack::from_floats(x).store(data + at); }
  __device__ void store_once(int64_t at, const float (&x)[kWidth]) const { Pack::from_floats(x).store_once(data + at); }
  __device__ Pack rounded(const float (&x)[kWidth]) const { return Pack::from_floats(x); }  // as stored
};

// Rows whose type is known when the kernel runs, each matrix's for itself: four elements an access, or one where rows
// do not start on boundaries.
template <int kWidth_>
struct AnyRows {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kPlain = false, kStaged = kWidth == 4;
  void* data;
  DType dtype;

  AnyRows(const Operand& rows) : data(rows.data), dtype(rows.dtype()) {}
  __device__ explicit operator bool() const { return data != nullptr; }

  // run(E()) for the element type
  template <class Run>
  __device__ void typed(const Run& run) const {
    if (dtype == DType::fp32)
      run(float());
    else if (dtype == DType::fp16)
      run(__half());
    else
      run(__nv_bfloat16());
  }

  __device__ void start(uint32_t slot, int64_t at, bool real) const {
    if (dtype == DType::fp32)
      copy_async16(slot, static_cast<const float*>(data) + (real ? at : 0), real);
    else
      copy_async8(slot, static_cast<const __half*>(data) + (real ? at : 0), real);
  }
  __device__ void read(const uint4& slot, int64_t at, float (&x)[kWidth]) const {
    typed([&]<class E>(E) {
      using Pack = Packed<E, kWidth>;
      if constexpr (kStaged)
        Pack{*reinterpret_cast<const typename Pack::Bits*>(&slot)}.to_floats(x);
      else
        Pack::load(static_cast<const E*>(data) + at).to_floats(x);
    });
  }
  __device__ void load(int64_t at, float (&x)[kWidth]) const {
    typed([&]<class E>(E) { Packed<E, kWidth>::load(static_cast<const E*>(data) + at).to_floats(x); });
  }
  struct Pack {
    float numbers[kWidth];
    static __device__ Pack zero() { return {}; }
    __device__ void to_floats(float (&x)[kWidth]) const {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = numbers[i];
    }
  };
  __device__ Pack load(int64_t at) const {
    Pack pack;
    load(at, pack.numbers);
    return pack;
  }
  __device__ void store(int64_t at, const float (&x)[kWidth]) const {
    typed([&]<class E>(E) { Packed<E, kWidth>::from_floats(x).store(static_cast<E*>(data) + at); });
  }
  __device__ Pack rounded(const float (&x)[kWidth]) const {
    Pack pack;
    typed([&]<class E>(E) { Packed<E, kWidth>::from_floats(x).to_floats(pack.numbers); });
    return pack;
  }
};

// ---- vectors -------------------------------------------------------------------------------------------------------

// kCount numbers of a vector as they are stored.
template <class E, int kCount>
struct VectorPack {
  static constexpr int kAccess = kCount < kWidth<E> ? kCount : kWidth<E>;
  Packed<E, kAccess> packs[kCount / kAccess];

  template <class Vector>
  __device__ void load(const Vector& vector, int col) {
#pragma unroll
    for (int i = 0; i < kCount / kAccess; ++i)
      packs[i] = Packed<E, kAccess>::load(static_cast<const E*>(vector.data) + col + i * kAccess);
  }
  __device__ void to_floats(float (&x)[kCount]) const { ftbert::to_floats(packs, x); }
};

struct Vector {
  const void* data;
  DType dtype;
  bool wide;  // starts on a boundary of 16 bytes
  Vector(const Operand& vector)
      : data(vector.data), dtype(vector.dtype()), wide(reinterpret_cast<uintptr_t>(vector.data) % 16 == 0) {}

  // x = kCount numbers from col on, a multiple of kCount; 0 where the vector is absent.
  template <int kCount>
  __device__ void read(int col, float (&x)[kCount]) const {
    if (data != nullptr && wide && kCount > 1) {
      if (dtype == DType::fp32)
        read_as<float>(col, x);
      else if (dtype == DType::fp16)
        read_as<__half>(col, x);
      else
        read_as<__nv_bfloat16>(col, x);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = at(col + i, 0);
    }
  }
  template <class E, int kCount>
  __device__ void read_as(int col, float (&x)[kCount]) const {
    VectorPack<E, kCount> pack;
    pack.load(*this, col);
    pack.to_floats(x);
  }

  __device__ float at(int col, float absent) const {
    if (data == nullptr) return absent;
    if (dtype == DType::fp32) return static_cast<const float*>(data)[col];
    if (dtype == DType::fp16) return __half2float(static_cast<const __half*>(data)[col]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[col]);
  }
};

// The same of a vector whose type is known when the kernel runs.
template <int kCount>
struct AnyVectorPack {
  float numbers[kCount];
  __device__ void load(const Vector& vector, int col) { vector.read(col, numbers); }
  __device__ void to_floats(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = numbers[i];
  }
};
template <class V, int kCount>
struct VectorPackOf {
  using type = VectorPack<V, kCount>;
};
template <int kCount>
struct VectorPackOf<void, kCount> {
  using type = AnyVectorPack<kCount>;
};
template <class V, int kCount>
using VectorOf = typename VectorPackOf<V, kCount>::type;

// Whether gamma and beta, where they are there, have this type and start on boundaries of 16 bytes.
inline bool vectors_are(DType dtype, const TrainingNorm& norm) {
  const auto fits = [&](const Operand& v) { return !v || (v.dtype() == dtype && Vector(v).wide); };
  return fits(norm.gamma) && fits(norm.beta);
}

// gamma with the offset; 1 where it is absent.
__device__ inline float gamma_at(const Vector& gamma, int col, float offset) {
  return gamma.data ? gamma.at(col, 0) + offset : 1.0f;
}

// 1 / gamma for x^ = (y - beta) / gamma, as NormBackward has it.
__device__ inline float inverse_gamma(float gamma, float eps) {
  return fast_reciprocal(gamma >= 0 ? fmaxf(gamma, eps) : fminf(gamma, -eps));
}

// Shapes of kernels, those of the shortest rows first.
template <class... Shapes>
struct ShapeList {
  // launch(Shape) of the first that holds a row and for which it returns true; false: there is none.
  template <class Launch>
  static bool first_that_holds(int64_t cols, const Launch& launch) {
    return ((cols <= Shapes::kCols && launch(Shapes())) || ...);
  }
};

inline constexpr int kLongThreads = 512;  // of a block that has a row to itself, too long for registers

// ---- types ---------------------------------------------------------------------------------------------------------

// By the matrices' types and places plain.operator()<T>(), T their one element type, which says whether it has a
// kernel, or any.operator()<AnyRows>().
template <class Any, class Plain>
void with_rows_of(int64_t cols, std::initializer_list<Operand> matrices, const Any& any, const Plain& plain) {
  bool one_type = true, wide = true, quads = cols % 4 == 0;
  const DType first = matrices.begin()->dtype();
  for (const Operand& matrix : matrices) {
    if (!matrix) continue;
    const auto place = reinterpret_cast<uintptr_t>(matrix.data);
    one_type = one_type && matrix.dtype() == first;
    wide = wide && place % 16 == 0 && cols * bytes_of(matrix.dtype()) % 16 == 0;
    quads = quads && place % (4 * bytes_of(matrix.dtype())) == 0;
  }
  if (one_type && wide) {
    if (first == DType::fp32 && plain.template operator()<float>()) return;
    if (first == DType::fp16 && plain.template operator()<half_t>()) return;
    if (first == DType::bf16 && plain.template operator()<bfloat16_t>()) return;
  }
  quads ? any.template operator()<AnyRows<4>>() : any.template operator()<AnyRows<1>>();
}

}  // namespace

// with_rows_of's plain: compiled in files of their own.
template <class T>
bool norm_forward_plain(Context<Cuda>& context, const NormForward& norm);
extern template bool norm_forward_plain<float>(Context<Cuda>&, const NormForward&);
extern template bool norm_forward_plain<half_t>(Context<Cuda>&, const NormForward&);
extern template bool norm_forward_plain<bfloat16_t>(Context<Cuda>&, const NormForward&);

// How many parts of the rows have their sums in norm.partials, and whether those of gamma are of grad * (y - beta).
// parts 0: there is no kernel for such rows.
struct BackwardParts {
  unsigned parts;
  bool times_gamma;
};
template <class T>
BackwardParts norm_backward_plain(Context<Cuda>& context, const NormBackward& norm);
extern template BackwardParts norm_backward_plain<float>(Context<Cuda>&, const NormBackward&);
extern template BackwardParts norm_backward_plain<half_t>(Context<Cuda>&, const NormBackward&);
extern template BackwardParts norm_backward_plain<bfloat16_t>(Context<Cuda>&, const NormBackward&);

}  // namespace ftbert
