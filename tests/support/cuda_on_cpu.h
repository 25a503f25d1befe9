// CUDA's words for a C++ compiler: one block at a time, its threads as fibers that take turns at barriers and shuffles. The
// order of turns can be reversed, which shows what depends on it. With TOGETHER defined all blocks of a grid are there at
// once, and also take turns. Includes are resolved by cuda_emulated.py.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>
#ifdef TOGETHER
#include <condition_variable>
#include <mutex>
#include <thread>
#endif

// What every block has of its own. One after the other they can have the same; together, each has a thread of the host.
#ifdef TOGETHER
#define OF_BLOCK thread_local
#else
#define OF_BLOCK
#endif

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static OF_BLOCK

using std::max;
using std::min;

struct Index { int x = 0, y = 0, z = 0; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bits_as(From v) { To to; static_assert(sizeof(To) == sizeof(From)); memcpy(&to, &v, sizeof v); return to; }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __int_as_float(unsigned v) { return bits_as<float>(v); }

// One IEEE rounding each: the compiler must not contract (-ffp-contract=off).
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline long long __float2ll_rn(float v) { return llrintf(v); }
inline float __ll2float_rn(long long v) { return static_cast<float>(v); }
inline double __ll2double_rn(long long v) { return static_cast<double>(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline uint64_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<uint64_t>(p); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <typename T> inline T __ldg(const T* at) { return *at; }
template <typename T> inline T __ldcg(const T* at) { return *at; }
template <typename T> inline void __stcg(T* at, T v) { *at = v; }
inline void __threadfence() {}
template <typename T> inline T atomicAdd(T* at, T v) { const T before = *at; *at += v; return before; }
template <typename T> inline T atomicMax(T* at, T v) { const T before = *at; *at = max(*at, v); return before; }
template <typename T> inline T atomicMin(T* at, T v) { const T before = *at; *at = min(*at, v); return before; }
template <typename T> inline T atomicOr(T* at, T v) { const T before = *at; *at |= v; return before; }
template <typename T> inline T atomicExch(T* at, T v) { const T before = *at; *at = v; return before; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __double2float_rn(double v) { return static_cast<float>(v); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low));
}

struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 v) { return bits_as<float>(static_cast<unsigned>(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const unsigned bits = bits_as<unsigned>(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }

namespace emulated {
enum State { kRuns, kAtWarp, kAtBlock, kWaits, kDone };
constexpr int kStackBytes = 1 << 16;
struct Fiber {
  ucontext_t context;
  jmp_buf at;
  bool started = false;
  State state = kRuns;
  std::function<bool()> may_go;  // of one that waits for something else than its warp or block
  std::unique_ptr<char[]> stack{new char[kStackBytes]};  // pages that nobody touches cost nothing
};
inline OF_BLOCK std::vector<Fiber> fibers;
inline ucontext_t main_context;
inline OF_BLOCK jmp_buf main_at;
inline std::function<void()> body;
inline OF_BLOCK int current = 0;
inline OF_BLOCK uint64_t exchanged[1024];

inline void leave_cluster();
inline void entry() {
  body();
  leave_cluster();
  fibers[current].state = kDone;
  _longjmp(main_at, 1);
}
inline void pause(State state) {
  Fiber& f = fibers[current];
  f.state = state;
  if (_setjmp(f.at) == 0) _longjmp(main_at, 1);
}
inline void resume(int i) {
  Fiber& f = fibers[i];
  current = i, f.state = kRuns;
  if (_setjmp(main_at)) return;
  if (f.started) _longjmp(f.at, 1);
  f.started = true;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = kStackBytes, f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
  setcontext(&f.context);
}
}  // namespace emulated

inline Index threadIdx, blockDim, gridDim;
inline OF_BLOCK Index blockIdx;

namespace emulated {
inline void start_block();
inline void start_clusters();
inline void leave_memory();
inline bool end_late_copies();
inline bool is_stuck;  // some wait where others do not: undefined on a GPU, or for ever
inline void begin_block(Index index, int threads) {
  blockIdx = index;
  if (static_cast<int>(fibers.size()) < threads) fibers.resize(threads);
  for (int i = 0; i < threads; ++i) fibers[i].started = false, fibers[i].state = kRuns;
  start_block();
}
inline bool all(int first, int end, State state) {
  for (int i = first; i < end; ++i)
    if (fibers[i].state != state && fibers[i].state != kDone) return false;
  return true;
}
inline bool has_ended(int threads) { return all(0, threads, kDone); }
// Every thread of the block goes on once, if it can; whether any could. `apart`: a warp goes on alone until all of it waits
// for the others, which shows where a barrier of the block is missing.
inline bool go_on(int threads, bool backwards, bool apart) {
  const auto turn = [&](int first, int end) {
    for (int warp = first; warp < end; warp += 32)
      if (all(warp, min(end, warp + 32), kAtWarp))
        for (int i = warp; i < min(end, warp + 32); ++i)
          if (fibers[i].state == kAtWarp) fibers[i].state = kRuns;
    bool moved = false;
    for (int k = first; k < end; ++k) {
      const int i = backwards ? end - 1 - (k - first) : k;
      if (fibers[i].state != kRuns) continue;
      threadIdx.x = i, moved = true;
      resume(i);
    }
    return moved;
  };
  if (all(0, threads, kAtBlock))
    for (int i = 0; i < threads; ++i)
      if (fibers[i].state == kAtBlock) fibers[i].state = kRuns;
  for (int i = 0; i < threads; ++i)
    if (fibers[i].state == kWaits && fibers[i].may_go()) fibers[i].state = kRuns;
  bool moved = false;
  const int at_once = apart ? 32 : threads;
  for (int k = 0; k < threads; k += at_once) {
    const int first = backwards ? max(0, threads - at_once - k) : k;
    while (turn(first, min(threads, first + at_once))) {
      moved = true;
      if (!apart) break;
    }
  }
  return moved;
}
inline void run_block(Index index, int threads, bool backwards, bool apart) {
  begin_block(index, threads);
  while (!has_ended(threads) && !is_stuck) is_stuck = !go_on(threads, backwards, apart) && !end_late_copies();
}
#ifdef TOGETHER
// Each block runs on a thread of its own, but only one at a time: until it cannot go on, then the next. Late copies end when
// no block can go on without them.
enum Task { kNothing, kGoOn, kEndCopies, kLeave };
struct Block {
  Index index;
  Task task = kNothing;
  bool moved = false, ended = false;
  std::condition_variable asked;
  std::thread thread;
};
inline void run_blocks(std::vector<Block>& blocks, int threads, bool backwards, bool apart) {
  std::mutex turn;  // held by whoever runs
  std::condition_variable answered;
  const auto run = [&](Block& own) {
    std::unique_lock<std::mutex> lock(turn);
    for (bool begun = false; !own.ended;) {
      own.asked.wait(lock, [&] { return own.task != kNothing; });
      if (!begun) begin_block(own.index, threads), begun = true;
      own.moved = own.task == kEndCopies && end_late_copies();
      if (own.task == kGoOn)
        while (!has_ended(threads) && go_on(threads, backwards, apart)) own.moved = true;
      own.ended = has_ended(threads) || own.task == kLeave;
      if (own.ended) leave_memory();  // which others can no more write into
      own.task = kNothing;
      answered.notify_one();
    }
  };
  const auto ask_all = [&](Task task) {
    bool moved = false;
    for (Block& block : blocks) {
      std::unique_lock<std::mutex> lock(turn);
      if (block.ended) continue;
      block.task = task;
      block.asked.notify_one();
      answered.wait(lock, [&] { return block.task == kNothing; });
      moved |= block.moved;
    }
    return moved;
  };
  for (Block& block : blocks) block.thread = std::thread(run, std::ref(block));
  while (ask_all(kGoOn) || ask_all(kEndCopies)) {}
  for (const Block& block : blocks) is_stuck |= !block.ended;
  ask_all(kLeave);
  for (Block& block : blocks) block.thread.join();
}
#endif
inline bool run_grid(const int* grid, int threads, bool backwards, bool apart, std::function<void()> kernel) {
  body = kernel, is_stuck = false;
  blockDim.x = threads, gridDim = {grid[0], grid[1], grid[2]};
  start_clusters();
#ifdef TOGETHER
  std::vector<Block> blocks(grid[0] * grid[1] * grid[2]);
  for (int i = 0, num = blocks.size(); i < num; ++i)
    blocks[backwards ? num - 1 - i : i].index = {i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]};
  run_blocks(blocks, threads, backwards, apart);
#else
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0] && !is_stuck; ++x) run_block({x, y, z}, threads, backwards, apart);
#endif
  return !is_stuck;
}
}  // namespace emulated

inline void __syncthreads() {
  const Index own = threadIdx;
  emulated::pause(emulated::kAtBlock);
  threadIdx = own;
}
inline int __syncthreads_or(int v) {
  static OF_BLOCK int any;
  any |= v != 0;
  __syncthreads();
  const int found = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return found;
}
inline void __syncwarp(unsigned = 0xffffffffu) {
  const Index own = threadIdx;
  emulated::pause(emulated::kAtWarp);
  threadIdx = own;
}
template <typename T>
inline T exchanged_with(T v, int lane) {
  static_assert(sizeof(T) <= 8);
  const int own = threadIdx.x;
  memcpy(&emulated::exchanged[own], &v, sizeof v);
  __syncwarp();
  T other;
  memcpy(&other, &emulated::exchanged[own / 32 * 32 + lane % 32], sizeof v);
  __syncwarp();
  return other;
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T v, int step) { return exchanged_with(v, threadIdx.x % 32 ^ step); }
template <typename T>
inline T __shfl_sync(unsigned, T v, int lane) { return exchanged_with(v, lane); }
template <typename T>
inline T __shfl_up_sync(unsigned, T v, int by) {
  const int lane = threadIdx.x % 32;
  return exchanged_with(v, lane < by ? lane : lane - by);
}

namespace emulated {
struct Named { int count = 0, turn = 0; };
inline OF_BLOCK Named named[16];
// A named barrier of so many threads: `arrive` goes on at once.
inline void arrive(int barrier, int threads) {
  if (++named[barrier].count == threads) named[barrier].count = 0, ++named[barrier].turn;
}
inline void wait_until(std::function<bool()> may_go) {
  if (may_go()) return;
  const Index own = threadIdx;
  fibers[current].may_go = may_go;
  pause(kWaits);
  threadIdx = own;
}
inline void meet(int barrier, int threads) {
  const int turn = named[barrier].turn;
  arrive(barrier, threads);
  wait_until([=] { return named[barrier].turn != turn; });
}
inline OF_BLOCK unsigned char dynamic_memory[1 << 18];
// Blocks beside each other in x are a cluster: barriers of all their threads that have not ended, and the shared memory of those
// that have begun.
struct Cluster { int count = 0, ended = 0, turn = 0; };
inline std::vector<Cluster> clusters;
inline std::vector<unsigned char*> memories;
inline int cluster_at() { return blockIdx.z * gridDim.y + blockIdx.y; }
inline void count_cluster(Cluster& c) {
  if (c.count > 0 && c.count + c.ended == gridDim.x * blockDim.x) c.count = 0, ++c.turn;
}
inline void leave_cluster() { ++clusters[cluster_at()].ended, count_cluster(clusters[cluster_at()]); }
inline void meet_cluster() {
  const int own = cluster_at(), turn = clusters[own].turn;
  ++clusters[own].count, count_cluster(clusters[own]);
  wait_until([=] { return clusters[own].turn != turn; });
}
template <typename T>
inline void put_there(T* at, int rank, T value) {
  unsigned char* there = memories[cluster_at() * gridDim.x + rank];
  if (there != nullptr) memcpy(there + (reinterpret_cast<unsigned char*>(at) - dynamic_memory), &value, sizeof value);
}
// A barrier in shared memory, which counts arrivals and bytes: every phase ends when all of them are there.
struct Barrier { int8_t phase, count, left, unused; int32_t nbytes; };
static_assert(sizeof(Barrier) == 8);
inline Barrier& barrier_at(void* at) { return *static_cast<Barrier*>(at); }
inline void count_at(void* at, int arrivals, int nbytes) {
  Barrier& b = barrier_at(at);
  b.left -= arrivals, b.nbytes += nbytes;
  if (b.left == 0 && b.nbytes == 0) b.phase ^= 1, b.left = b.count;
}
inline void start_barrier(void* at, int count) { barrier_at(at) = {0, static_cast<int8_t>(count), static_cast<int8_t>(count), 0, 0}; }
inline void wait_for(void* at, int phase) { wait_until([=] { return barrier_at(at).phase != phase; }); }
// Floats of 8 bits: a sign, four bits of exponent, three behind the first; no infinity.
inline double e4m3_value(unsigned char bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return NAN;
  return (bits & 0x80 ? -1 : 1) * (exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9));
}
inline unsigned char e4m3_bits(float v) {  // the nearest, of two the even one; the largest for what is larger
  if (v != v) return 0x7f;
  const float size = min(std::fabs(v), 448.0f);
  int exponent;
  std::frexp(max(size, 0x1p-6f), &exponent);  // below that steps get no smaller
  const int steps = std::nearbyint(std::ldexp(size, 4 - exponent));
  return (exponent + 5) * 8 + steps + (std::signbit(v) ? 0x80 : 0);
}
inline unsigned short e4m3_pair(float first, float second) { return e4m3_bits(first) | e4m3_bits(second) << 8; }
// d (16 x 8) = c + a (16 x 32) b (32 x 8), numbers of 8 bits, as a warp's lanes hold them: all are added, then rounded once.
template <typename Sum, typename Value>
inline void mma_of_bytes(Sum* d, const unsigned* a, uint2 b, Sum c, Value value) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned char own[32][16], rows[32][8];
  for (int source = 0; source < 32; ++source) {
    for (int i = 0; i < 4; ++i) {
      const unsigned word = exchanged_with(a[i], source);
      memcpy(own[source] + 4 * i, &word, 4);
    }
    const unsigned low = exchanged_with(b.x, source), high = exchanged_with(b.y, source);
    memcpy(rows[source], &low, 4), memcpy(rows[source] + 4, &high, 4);
  }
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    double sum = c;
    for (int k = 0; k < 32; ++k) {
      const int holder = k % 16 / 4, weight = (k / 16 * 2 + row / 8) * 4 + k % 4;
      sum += value(own[row % 8 * 4 + holder][weight]) * value(rows[column * 4 + holder][k / 16 * 4 + k % 4]);
    }
    d[e] = static_cast<Sum>(sum);
  }
}
inline void whole_mma(int* d, const unsigned* a, uint2 b, int c) {
  mma_of_bytes(d, a, b, c, [](unsigned char bits) { return static_cast<signed char>(bits); });
}
inline void e4m3_mma(float* d, const unsigned* a, uint2 b) { mma_of_bytes(d, a, b, 0.0f, e4m3_value); }

// A number of words of each lane, where all lanes of the warp can read them until the next such exchange.
inline OF_BLOCK unsigned words[1024][6];
inline const unsigned (*exchanged_words(const unsigned* own, int count))[6] {
  __syncwarp();  // those of the last one have been read
  memcpy(words[threadIdx.x], own, 4 * count);
  __syncwarp();
  return words + threadIdx.x / 32 * 32;
}
inline float half_of(unsigned word, int half) { return bits_as<float>(half ? word & 0xffff0000u : word << 16); }
// d (16 x 8) += a (16 x 16) b (16 x 8) of bf16: the sum of all products is rounded once. A tensor core rounds otherwise.
inline void mma(float* d, const unsigned* a, const unsigned* b) {
  const unsigned own[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const auto lanes = exchanged_words(own, 6);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int e = 0; e < 4; ++e) {
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2, upper = k / 8;
      const double weight = half_of(lanes[g * 4 + holder][2 * upper + e / 2], k % 2);
      sum += weight * half_of(lanes[(2 * t + e % 2) * 4 + holder][4 + upper], k % 2);
    }
    d[e] = static_cast<float>(d[e] + sum);
  }
}
// Four matrices of 8 x 8, transposed; lane 8 i + r knows where row r of the i-th one is.
inline void load_transposed(unsigned* to, const unsigned char* memory, unsigned row) {
  const auto lanes = exchanged_words(&row, 1);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int k = 0; k < 2; ++k) memcpy(&pair[k], memory + lanes[8 * i + 2 * t + k][0] + 2 * g, 2);
    memcpy(&to[i], pair, 4);
  }
}

// Copies in the background: as early as they can be, or, `LATE`, not before they are waited for. What begins with this mark
// is written by the kernel in front: whoever did not wait for its end does not find it.
constexpr uint16_t kWrittenLate = 0x0d81;
inline OF_BLOCK bool previous_has_ended[1024];
inline void previous_ended() { previous_has_ended[threadIdx.x] = true; }
struct Copy { unsigned char* to; const void* from; bool wanted; };
inline OF_BLOCK std::vector<std::vector<Copy>> groups[1024];  // of each thread; the last one is open
inline void end_copy(const Copy& c) {
  if (c.from == nullptr) memset(c.to, 0xff, 16);
  else if (c.wanted) memcpy(c.to, c.from, 16);
  else memset(c.to, 0, 16);
}
template <bool LATE>
inline void copy(unsigned char* to, const void* from, bool wanted) {
  auto& own = groups[threadIdx.x];
  if (wanted && !previous_has_ended[threadIdx.x] && !memcmp(from, &kWrittenLate, 2)) from = nullptr;
  LATE ? own.back().push_back({to, from, wanted}) : end_copy({to, from, wanted});
}
inline void commit_copies() { groups[threadIdx.x].emplace_back(); }
inline void wait_for_copies(int left) {
  auto& own = groups[threadIdx.x];
  while (static_cast<int>(own.size()) - 1 > left) {
    for (const Copy& c : own.front()) end_copy(c);
    own.erase(own.begin());
  }
}

// Boxes of a matrix, by the copy engine: at once, or, `LATE`, not before nobody can go on without them. The map is of four words:
// the matrix, its rows and columns, and the rows of a box, which has 64 columns. Swizzled by the places in memory.
struct Box { unsigned char* to; const uint64_t* map; int column, row; void* barrier; bool early; int eight = -1; };
inline OF_BLOCK std::vector<Box> boxes;
inline void end_box(const Box& box) {
  const auto [matrix, rows, columns, box_rows] = std::tuple(box.map[0], box.map[1], box.map[2], box.map[3]);
  for (unsigned i = 0; i < box_rows * 8; ++i) {
    const unsigned at = box.to - dynamic_memory + i * 16, n = i / 8;
    const unsigned row = box.row + (box.eight < 0 ? n : n / 2 % 4 * 16 + 2 * (box.eight + n / 8) + n % 2);
    const void* from = reinterpret_cast<const uint16_t*>(matrix) + row * columns + box.column + i % 8 * 8;
    const bool there = row < rows;
    if (there && box.early && !memcmp(from, &kWrittenLate, 2)) from = nullptr;
    end_copy({dynamic_memory + (at ^ (at >> 7 & 7) << 4), from, there});
  }
  count_at(box.barrier, 0, -static_cast<int>(box_rows * 128));
}
template <bool LATE>
inline void copy_box(unsigned char* to, const void* map, int column, int row, void* barrier) {
  const Box box = {to, static_cast<const uint64_t*>(map), column, row, barrier, !previous_has_ended[threadIdx.x]};
  LATE ? boxes.push_back(box) : end_box(box);
}
// 32 rows of a block of 64 weights, as large.cu orders them.
template <bool LATE>
inline void copy_block(unsigned char* to, const void* map, int column, int eight, int block, void* barrier) {
  const bool early = !previous_has_ended[threadIdx.x];
  const Box box = {to, static_cast<const uint64_t*>(map), column, block * 64, barrier, early, eight};
  LATE ? boxes.push_back(box) : end_box(box);
}
inline bool end_late_copies() {
  const bool found = !boxes.empty();
  for (const Box& box : boxes) end_box(box);
  boxes.clear();
  return found;
}

// Steps of 64 rows whose operands lie in shared memory (wide.cuh): at once, or, `LATE`, not before they are waited for.
struct Step { float (*d)[4]; uint64_t a, b; int adds, outputs, warp; };
inline OF_BLOCK std::vector<std::vector<Step>> steps[1024];  // of each thread; the last group is open
inline double operand_at(uint64_t operand, int row, int k) {
  const auto field = [&](int first) { return static_cast<unsigned>(operand >> first & 0x3fff) << 4; };
  const unsigned at = field(0) + row / 8 * field(32) + row % 8 * 128 + 2 * k;
  uint16_t bits;
  memcpy(&bits, dynamic_memory + (at ^ (at >> 7 & 7) << 4), 2);
  return half_of(bits, 0);
}
inline void end_step(const Step& step) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < step.outputs / 2; ++i) {
    const int row = step.warp * 16 + lane / 4 + i % 4 / 2 * 8, output = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) sum += operand_at(step.a, row, k) * operand_at(step.b, output, k);
    float& d = step.d[i / 4][i % 4];
    d = static_cast<float>((step.adds ? d : 0.0f) + sum);
  }
}
template <bool LATE>
inline void wide_step(float (*d)[4], uint64_t a, uint64_t b, int adds, int outputs, int warp) {
  const Step step = {d, a, b, adds, outputs, warp};
  if (LATE) steps[threadIdx.x].back().push_back(step);
  else end_step(step);
}
inline void commit_steps() { steps[threadIdx.x].emplace_back(); }
inline void wait_for_steps(int left) {
  auto& own = steps[threadIdx.x];
  while (static_cast<int>(own.size()) - 1 > left) {
    for (const Step& step : own.front()) end_step(step);
    own.erase(own.begin());
  }
}

// What a block did not wait for is lost, and the next one finds nothing of it in its shared memory.
inline void start_block() {
  for (auto& own : groups) own.assign(1, {});
  for (auto& own : steps) own.assign(1, {});
  boxes.clear();
  for (Named& barrier : named) barrier = {};  // which a block that was stuck has left
  memset(previous_has_ended, 0, sizeof previous_has_ended);
  memset(dynamic_memory, 0xff, sizeof dynamic_memory);
  memories[cluster_at() * gridDim.x + blockIdx.x] = dynamic_memory;
}
inline void leave_memory() { memories[cluster_at() * gridDim.x + blockIdx.x] = nullptr; }
inline void start_clusters() {
  clusters.assign(gridDim.y * gridDim.z, {});
  memories.assign(gridDim.x * gridDim.y * gridDim.z, nullptr);
}
}  // namespace emulated
