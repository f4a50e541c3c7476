// Copies between memory and messages, piece by piece in one launch; checksums of messages, and of pieces on either side.
// A piece is up to four dimensions of units; a message carries them row-major.

#define UNITS 2048  // of one tile: what a block copies
#define THREADS 256

struct Piece {
  long long memory;     // address of its first element where it lies
  long long wire;       // address of its first byte in the message
  long long units;      // number of them
  long long kind;       // bytes of a unit; CONVERT and CONVERT4: float32 in memory, bfloat16 on the wire
  long long extent[3];  // of the inner three dimensions
  long long stride[4];  // of all four in memory, in units
  long long spare;
};

#define CONVERT 100
#define CONVERT4 101
#define PACK 0
#define UNPACK 1
#define COMPARE 2

template <typename T>
__device__ __forceinline__ bool same(const T& a, const T& b) { return a == b; }
template <>
__device__ __forceinline__ bool same<uint4>(const uint4& a, const uint4& b) {
  return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}
template <>
__device__ __forceinline__ bool same<uint2>(const uint2& a, const uint2& b) { return a.x == b.x && a.y == b.y; }

__device__ __forceinline__ long long place(const Piece& p, unsigned unit) {
  const unsigned e3 = (unsigned)p.extent[2];
  unsigned rest = unit / e3;
  long long at = (long long)(unit - rest * e3) * p.stride[3];
  if (rest == 0) return at;
  const unsigned e2 = (unsigned)p.extent[1];
  unsigned outer = rest / e2;
  at += (long long)(rest - outer * e2) * p.stride[2];
  if (outer == 0) return at;
  const unsigned e1 = (unsigned)p.extent[0];
  unsigned first = outer / e1;
  return at + (long long)(outer - first * e1) * p.stride[1] + (long long)first * p.stride[0];
}

template <typename T>
__device__ __forceinline__ void copy(const Piece& p, unsigned begin, unsigned end, int mode, unsigned* wrong) {
  T* memory = (T*)p.memory;
  T* wire = (T*)p.wire;
  unsigned different = 0;
#pragma unroll 4
  for (unsigned unit = begin + threadIdx.x; unit < end; unit += THREADS) {
    const long long at = place(p, unit);
    if (mode == PACK) wire[unit] = memory[at];
    else if (mode == UNPACK) memory[at] = wire[unit];
    else different += !same<T>(memory[at], wire[unit]);
  }
  if (different) atomicAdd(wrong, different);
}

__device__ __forceinline__ unsigned short rounded(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

extern "C" __global__ void move(const Piece* pieces, const long long* tiles, int mode, unsigned* wrong) {
  const Piece& p = pieces[tiles[2 * blockIdx.x]];
  const unsigned begin = (unsigned)tiles[2 * blockIdx.x + 1];
  const unsigned end = begin + UNITS < (unsigned)p.units ? begin + UNITS : (unsigned)p.units;
  switch (p.kind) {
    case 16: copy<uint4>(p, begin, end, mode, wrong); break;
    case 8: copy<uint2>(p, begin, end, mode, wrong); break;
    case 4: copy<unsigned>(p, begin, end, mode, wrong); break;
    case 2: copy<unsigned short>(p, begin, end, mode, wrong); break;
    case 1: copy<unsigned char>(p, begin, end, mode, wrong); break;
    case CONVERT:
      for (unsigned unit = begin + threadIdx.x; unit < end; unit += THREADS)
        ((unsigned short*)p.wire)[unit] = rounded(((const float*)p.memory)[place(p, unit)]);
      break;
    case CONVERT4:
      for (unsigned unit = begin + threadIdx.x; unit < end; unit += THREADS) {
        const float4 v = ((const float4*)p.memory)[place(p, unit)];
        ushort4 r;
        r.x = rounded(v.x); r.y = rounded(v.y); r.z = rounded(v.z); r.w = rounded(v.w);
        ((ushort4*)p.wire)[unit] = r;
      }
      break;
  }
}

typedef unsigned long long Sum;

__device__ __forceinline__ void add(const int4& w, long long index, Sum& plain, Sum& weighted) {
  const long long x = w.x, y = w.y, z = w.z, u = w.w;
  const Sum four = (Sum)(x + y + z + u);
  plain += four;
  weighted += four * (Sum)(4 * index + 1) + (Sum)(y + 2 * z + 3 * u);
}
__device__ __forceinline__ void add(const int2& w, long long index, Sum& plain, Sum& weighted) {
  const long long x = w.x, y = w.y;
  plain += (Sum)(x + y);
  weighted += (Sum)(x + y) * (Sum)(2 * index + 1) + (Sum)y;
}
template <typename T>
__device__ __forceinline__ void add(const T& value, long long index, Sum& plain, Sum& weighted) {
  plain += (Sum)value;
  weighted += (Sum)value * (Sum)(index + 1);
}

__device__ __forceinline__ void collect(Sum plain, Sum weighted, Sum* sums) {
  for (int step = 16; step; step /= 2) {
    plain += __shfl_down_sync(0xffffffffu, plain, step);
    weighted += __shfl_down_sync(0xffffffffu, weighted, step);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums[0], plain);
    atomicAdd(&sums[1], weighted);
  }
}

// messages: address and number of 16-byte words of each. sums: two numbers for each, added to. Block row = message.
extern "C" __global__ void sums(const long long* messages, Sum* sums) {
  const int4* words = (const int4*)messages[2 * blockIdx.y];
  const long long count = messages[2 * blockIdx.y + 1];
  Sum plain = 0, weighted = 0;
  for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS)
    add(words[i], i, plain, weighted);
  collect(plain, weighted, &sums[2 * blockIdx.y]);
}

template <typename T>
__device__ __forceinline__ void summed(
    const Piece& p, unsigned begin, unsigned end, int wired, long long base, Sum& plain, Sum& weighted) {
  const T* from = (const T*)(wired ? p.wire : p.memory);
  const long long first = (p.wire - base) / (long long)sizeof(T);
#pragma unroll 4
  for (unsigned unit = begin + threadIdx.x; unit < end; unit += THREADS)
    add(from[wired ? (long long)unit : place(p, unit)], first + unit, plain, weighted);
}

// Of all pieces as they are in their messages (wired) or where they lie: two numbers, added to. A unit weighs as far as
// it is from address base in its message, so that both sides agree where every unit is in its place.
extern "C" __global__ void pieces_sum(
    const Piece* pieces, const long long* tiles, long long count, int wired, long long base, Sum* sums) {
  Sum plain = 0, weighted = 0;
  for (long long tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const Piece& p = pieces[tiles[2 * tile]];
    const unsigned begin = (unsigned)tiles[2 * tile + 1];
    const unsigned end = begin + UNITS < (unsigned)p.units ? begin + UNITS : (unsigned)p.units;
    switch (p.kind) {
      case 16: summed<int4>(p, begin, end, wired, base, plain, weighted); break;
      case 8: summed<int2>(p, begin, end, wired, base, plain, weighted); break;
      case 4: summed<unsigned>(p, begin, end, wired, base, plain, weighted); break;
      case 2: summed<unsigned short>(p, begin, end, wired, base, plain, weighted); break;
      case 1: summed<unsigned char>(p, begin, end, wired, base, plain, weighted); break;
    }
  }
  collect(plain, weighted, sums);
}
