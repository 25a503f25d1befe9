// What stands around library products of many rows: each kernel finishes one linear layer, with the bits of linear.cu.
// Compiled for one model: WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, and PARTS of the layer whose product comes in. A product
// of one part comes as bf16 [rows, N], of several as float32 [PARTS, rows, N].
#include "tiles.cuh"

using namespace vs;

struct Args {
  const void* y;          // the product
  const float* nodes_in;  // [rows, WIDTH / 16]
  void* out;              // q, x (in and out), h, logits
  const float* bias;      // [N] in the order of heads, or null
  const float* q_gain;    // [HEAD_DIM] q/k norm, or null
  const float* k_gain;
  const float* post_gain; // the norm behind a layer [WIDTH]
  const float* cosines;   // [context, HEAD_DIM / 2]
  const float* sines;
  const int* positions;   // [rows]
  const int* slots;       // [rows]
  bf16* k_store;          // [slots, KV_HEADS, HEAD_DIM]
  bf16* v_store;
  int* not_finite;        // [rows]
  const float* gain;      // the next norm's weight [WIDTH]
  bf16* scaled;           // [rows, WIDTH]
  float* nodes_out;       // [rows, WIDTH / 16]
  const int* row_ids;     // head: which rows of the pass, or null. embedding: token ids
  const bf16* table;      // embedding: [vocabulary, WIDTH]
  const int* state_ids;   // embedding: rows that start from one of `states`, -1 for the others; or null
  const bf16* states;     // [.., WIDTH]
  float eps;
  float embed_scale;
  int rows;
  int width;              // N of the head
};

// Eight neighbouring outputs of a row, rounded to bf16, from `n` on, which is a multiple of eight.
__device__ __forceinline__ void load_outputs(const Args& a, int n_total, int row, int n, float* y) {
  const int64 at = static_cast<int64>(row) * n_total + n;
#if PARTS == 1
  unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.y) + at), y);
#else
  float4 v[PARTS][2];
#pragma unroll
  for (int p = 0; p < PARTS; ++p)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      v[p][i] = reinterpret_cast<const float4*>(static_cast<const float*>(a.y) + at + static_cast<int64>(p) * a.rows * n_total)[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float parts[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) parts[p] = reinterpret_cast<const float*>(v[p])[i];
    y[i] = rounded(tree_of_parts<PARTS>(parts));
  }
#endif
}

// The factor of the block's row: by its first warp, for all; the others go on up to the barrier.
__device__ __forceinline__ float row_factor(const Args& a, int row) {
  __shared__ float factor;
  if (threadIdx.x < 32) {
    const float* nodes = a.nodes_in + static_cast<int64>(row) * (WIDTH / 16);
    float ss;
    sums_of_nodes<WIDTH, 1>(&nodes, &ss, threadIdx.x);
    if (threadIdx.x == 0) factor = norm_factor(ss, 1.0f / WIDTH, a.eps);
  }
  __syncthreads();
  return factor;
}

// grid (rows, heads per block): HEAD_DIM / 16 threads finish one head of q, k or v of one row, each a tile of eight first
// elements of pairs and their eight partners. Threads of a head are neighbours in a warp where a norm needs whole heads.
extern "C" __global__ void __launch_bounds__(256) qkv_rows(const Args a) {
  constexpr int kHalf = HEAD_DIM / 2, kPer = HEAD_DIM / 16, kHeads = HEADS + 2 * KV_HEADS;
  const int row = blockIdx.x, at = blockIdx.y * blockDim.x + threadIdx.x;
  release_next();
  wait_for_previous();
  const bool valid = at < kHeads * kPer;
  const int head = valid ? at / kPer : 0, first = at % kPer * 8;
  const bool turns = head < HEADS + KV_HEADS;
  const int64 place = turns ? static_cast<int64>(a.positions[row]) * kHalf + first : 0, slot = head < HEADS ? 0 : a.slots[row];
  float v0[8], v1[8], c[8], si[8];
  load_outputs(a, kHeads * HEAD_DIM, row, head * HEAD_DIM + 2 * first, v0);
  load_outputs(a, kHeads * HEAD_DIM, row, head * HEAD_DIM + 2 * first + 8, v1);
  load_eight(a.cosines + place, c);
  load_eight(a.sines + place, si);
  scale_pairs(a, head, first, row_factor(a, row), v0, v1);
  if (a.q_gain != nullptr) {  // HEAD_DIM is a power of two here
    float square0[8], square1[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) square0[i] = mul(v0[i], v0[i]), square1[i] = mul(v1[i], v1[i]);
    float low = register_tree<8>(square0), high = register_tree<8>(square1);
#pragma unroll
    for (int step = 1; step < kPer; step *= 2) {
      low = add(low, __shfl_xor_sync(0xffffffffu, low, step));
      high = add(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    const float factor = norm_factor(add(low, high), 1.0f / HEAD_DIM, a.eps);
    const float* gain = head < HEADS ? a.q_gain : a.k_gain;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (turns) {
        v0[i] = mul(mul(v0[i], factor), gain[first + i]);
        v1[i] = mul(mul(v1[i], factor), gain[first + i + kHalf]);
      }
  }
  if (valid) store_pairs(a, row, slot, head, first, c, si, v0, v1);
}

// Eight neighbours of the residual stream and their scaled form; two threads, lanes 2 i and 2 i + 1, make one node, the tree
// of the squares of 16. All lanes take part.
__device__ __forceinline__ void write_eight(const Args& a, int row, int n, bool valid, const float* v) {
  const float half = store_stream(a, row, n, valid, v), node = add(half, __shfl_xor_sync(0xffffffffu, half, 1));
  if (valid && n % 16 == 0) a.nodes_out[(static_cast<int64>(row) * WIDTH + n) / 16] = node;
}

// grid (rows x WIDTH / 8 / 128): x = bf16(x + Y), its scaled form and its nodes.
extern "C" __global__ void __launch_bounds__(128) residual_rows(const Args a) {
  release_next();
  wait_for_previous();
  const int at = blockIdx.x * 128 + threadIdx.x;
  const bool valid = at < a.rows * (WIDTH / 8);
  const int row = valid ? at / (WIDTH / 8) : 0, n = valid ? at % (WIDTH / 8) * 8 : threadIdx.x % 2 * 8;
  float x[8], y[8];
  const uint4 before = *reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.out) + static_cast<int64>(row) * WIDTH + n);
  load_outputs(a, WIDTH, row, n, y);
  unpack(before, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = rounded(add(x[i], y[i]));
  write_eight(a, row, n, valid, x);
}

// grid (rows), WIDTH / 8 threads: Y goes through a norm of its own before it is added.
extern "C" __global__ void __launch_bounds__(1024) post_norm_rows(const Args a) {
  __shared__ float nodes[WIDTH / 16], factor;
  release_next();
  wait_for_previous();
  const int row = blockIdx.x;
  const bool valid = threadIdx.x < WIDTH / 8;
  const int n = (valid ? threadIdx.x : threadIdx.x % 2) * 8;
  float x[8], y[8], square[8];
  load_outputs(a, WIDTH, row, n, y);
  unpack(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(a.out) + static_cast<int64>(row) * WIDTH + n), x);
#pragma unroll
  for (int i = 0; i < 8; ++i) square[i] = mul(y[i], y[i]);
  const float half = register_tree<8>(square), node = add(half, __shfl_xor_sync(0xffffffffu, half, 1));
  if (valid && n % 16 == 0) nodes[n / 16] = node;
  __syncthreads();
  if (threadIdx.x < 32) {
    const float* from = nodes;
    float ss;
    sums_of_nodes<WIDTH, 1>(&from, &ss, threadIdx.x);
    if (threadIdx.x == 0) factor = norm_factor(ss, 1.0f / WIDTH, a.eps);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = rounded(add(x[i], mul(mul(y[i], factor), a.post_gain[n + i])));
  write_eight(a, row, n, valid, x);
}

// grid (rows x WIDTH / 8 / 128): the embedding row. It fences one pass from the next: it releases nobody early.
extern "C" __global__ void __launch_bounds__(128) embed_rows(const Args a) {
  wait_for_previous();
  const int at = blockIdx.x * 128 + threadIdx.x;
  const bool valid = at < a.rows * (WIDTH / 8);
  const int row = valid ? at / (WIDTH / 8) : 0, n = valid ? at % (WIDTH / 8) * 8 : threadIdx.x % 2 * 8;
  float v[8];
  const int state = a.state_ids != nullptr ? a.state_ids[row] : -1;
  const bf16* from = state < 0 ? a.table + static_cast<int64>(a.row_ids[row]) * WIDTH : a.states + static_cast<int64>(state) * WIDTH;
  unpack(*reinterpret_cast<const uint4*>(from + n), v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = state < 0 ? rounded(mul(v[i], a.embed_scale)) : v[i];
  write_eight(a, row, n, valid, v);
  if (valid && n == 0) a.not_finite[row] = 0;
}

// grid (rows, MLP / 8 / threads): a thread takes a tile of eight gates and their eight partners.
extern "C" __global__ void __launch_bounds__(256) gate_up_rows(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x, tile = blockIdx.y * blockDim.x + threadIdx.x;
  const bool valid = tile < MLP / 8;
  float gate[8], up[8];
  if (valid) {
    load_outputs(a, 2 * MLP, row, tile * 16, gate);
    load_outputs(a, 2 * MLP, row, tile * 16 + 8, up);
  }
  const float s = row_factor(a, row);
  if (!valid) return;
  activate(gate, up, s);
  *reinterpret_cast<uint4*>(static_cast<bf16*>(a.out) + static_cast<int64>(row) * MLP + tile * 8) = pack(gate);
}

// grid (rows / 8): a warp for each row, whose norm factor large.cu multiplies with; they go to `out`.
extern "C" __global__ void __launch_bounds__(256) row_factors(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= a.rows) return;
  const float* nodes = a.nodes_in + static_cast<int64>(row) * (WIDTH / 16);
  float ss;
  sums_of_nodes<WIDTH, 1>(&nodes, &ss, lane);
  if (lane == 0) static_cast<float*>(a.out)[row] = norm_factor(ss, 1.0f / WIDTH, a.eps);
}

// grid (head rows, width / 4096): logits = y s in place, y being float32 [head rows, width] of one part.
extern "C" __global__ void __launch_bounds__(256) head_rows(const Args a) {
  release_next();
  wait_for_previous();
  const float s = row_factor(a, a.row_ids == nullptr ? blockIdx.x : a.row_ids[blockIdx.x]);
  float4* logits = reinterpret_cast<float4*>(static_cast<float*>(a.out) + static_cast<int64>(blockIdx.x) * a.width);
  for (int n = blockIdx.y * 1024 + threadIdx.x; n < min(a.width / 4, blockIdx.y * 1024 + 1024); n += 256) {
    const float4 y = logits[n];
    logits[n] = make_float4(mul(y.x, s), mul(y.y, s), mul(y.z, s), mul(y.w, s));
  }
}
