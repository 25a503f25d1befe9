// What stands around library products of many rows: each kernel finishes one linear layer, with the bits of linear.cu.
// Compiled for one model: WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, and PARTS of the layer whose product comes in. A product
// of one part comes as bf16 [rows, N], of several as float32 [PARTS, rows, N].
#include "arithmetic.cuh"

using namespace vs;

struct Args {
  const void* y;          // the product
  const float* nodes_in;  // [rows, WIDTH / 16]
  void* out;              // q, x (in and out), h, logits
  const float* bias;      // [N] in the order of heads, or null
  const float* q_gain;    // [HEAD_DIM] q/k norm, or null
  const float* k_gain;
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
  float eps;
  int rows;
  int width;              // N of the head
};

__device__ __forceinline__ float output(const Args& a, int n_total, int row, int n) {
  const int64 at = static_cast<int64>(row) * n_total + n;
#if PARTS == 1
  return to_float(static_cast<const bf16*>(a.y)[at]);
#else
  float parts[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; ++p)
    parts[p] = static_cast<const float*>(a.y)[at + static_cast<int64>(p) * a.rows * n_total];
  return rounded(tree_of_parts<PARTS>(parts));
#endif
}

__device__ __forceinline__ float row_factor(const Args& a, int row) {
  const float* nodes = a.nodes_in + static_cast<int64>(row) * (WIDTH / 16);
  float ss;
  sums_of_nodes<WIDTH, 1>(&nodes, &ss, threadIdx.x % 32);
  return norm_factor(ss, 1.0f / WIDTH, a.eps);
}

// Weight rows stand in tiles of 16: eight first elements of pairs, then their eight partners.
__device__ __forceinline__ int first_of_pair(int pair) { return pair / 8 * 16 + pair % 8; }

// grid (rows, heads / 4): a warp finishes one head of q, k or v of one row.
extern "C" __global__ void __launch_bounds__(128) qkv_rows(const Args a) {
  constexpr int kHalf = HEAD_DIM / 2, kPer = kHalf < 32 ? 1 : kHalf / 32, kTotal = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
  const int row = blockIdx.x, head = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  release_next();
  wait_for_previous();
  if (head >= HEADS + 2 * KV_HEADS) return;
  const float s = row_factor(a, row);
  float v0[kPer], v1[kPer], square0[kPer], square1[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int pair = lane * kPer + i;
    v0[i] = v1[i] = 0.0f;
    if (pair < kHalf) {
      v0[i] = mul(output(a, kTotal, row, head * HEAD_DIM + first_of_pair(pair)), s);
      v1[i] = mul(output(a, kTotal, row, head * HEAD_DIM + first_of_pair(pair) + 8), s);
      if (a.bias != nullptr) {
        v0[i] = add(v0[i], a.bias[head * HEAD_DIM + pair]);
        v1[i] = add(v1[i], a.bias[head * HEAD_DIM + pair + kHalf]);
      }
    }
    square0[i] = mul(v0[i], v0[i]);
    square1[i] = mul(v1[i], v1[i]);
  }
  const bool turns = head < HEADS + KV_HEADS;
  const float* gain = head < HEADS ? a.q_gain : turns ? a.k_gain : nullptr;
  if (gain != nullptr) {
    const float ss = add(warp_tree(register_tree<kPer>(square0)), warp_tree(register_tree<kPer>(square1)));
    const float factor = norm_factor(ss, 1.0f / HEAD_DIM, a.eps);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int pair = min(lane * kPer + i, kHalf - 1);
      v0[i] = mul(mul(v0[i], factor), gain[pair]);
      v1[i] = mul(mul(v1[i], factor), gain[pair + kHalf]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int pair = lane * kPer + i;
    if (pair >= kHalf) continue;
    if (turns) {
      const int64 at = static_cast<int64>(a.positions[row]) * kHalf + pair;
      const float c = a.cosines[at], si = a.sines[at], first = v0[i];
      v0[i] = fused(-v1[i], si, mul(first, c));
      v1[i] = fused(first, si, mul(v1[i], c));
    }
    bf16* to = static_cast<bf16*>(a.out) + (static_cast<int64>(row) * HEADS + head) * HEAD_DIM;
    if (head >= HEADS) {
      v0[i] = rounded(v0[i]);
      v1[i] = rounded(v1[i]);
      if (!(fabsf(v0[i]) <= 3.4e38f) || !(fabsf(v1[i]) <= 3.4e38f)) {
        a.not_finite[row] = 1;
        v0[i] = v1[i] = 0.0f;
      }
      to = (turns ? a.k_store : a.v_store) +
           (static_cast<int64>(a.slots[row]) * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM;
    }
    to[pair] = to_bf16(v0[i]);
    to[pair + kHalf] = to_bf16(v1[i]);
  }
}

// One thread makes one node: 16 neighbours of the residual stream, their scaled form and the tree of their squares.
__device__ __forceinline__ void write_node(const Args& a, int row, int node, float* v) {
  const int64 at = static_cast<int64>(row) * WIDTH + node * 16;
  bf16* x = static_cast<bf16*>(a.out) + at;
  alignas(16) bf16 plain[16], scaled[16];
  float square[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    plain[i] = to_bf16(v[i]);
    scaled[i] = to_bf16(mul(v[i], a.gain[node * 16 + i]));
    square[i] = mul(v[i], v[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(x)[i] = reinterpret_cast<uint4*>(plain)[i];
    reinterpret_cast<uint4*>(a.scaled + at)[i] = reinterpret_cast<uint4*>(scaled)[i];
  }
  a.nodes_out[static_cast<int64>(row) * (WIDTH / 16) + node] = register_tree<16>(square);
}

// grid (rows): x = bf16(x + Y), its scaled form and its nodes.
extern "C" __global__ void __launch_bounds__(128) residual_rows(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x;
  for (int node = threadIdx.x; node < WIDTH / 16; node += blockDim.x) {
    const bf16* x = static_cast<const bf16*>(a.out) + static_cast<int64>(row) * WIDTH + node * 16;
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = rounded(add(to_float(x[i]), output(a, WIDTH, row, node * 16 + i)));
    write_node(a, row, node, v);
  }
}

// grid (rows): the embedding row. It fences one pass from the next: it releases nobody early.
extern "C" __global__ void __launch_bounds__(128) embed_rows(const Args a) {
  wait_for_previous();
  const int row = blockIdx.x;
  const bf16* from = a.table + static_cast<int64>(a.row_ids[row]) * WIDTH;
  for (int node = threadIdx.x; node < WIDTH / 16; node += blockDim.x) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = to_float(from[node * 16 + i]);
    write_node(a, row, node, v);
  }
  if (threadIdx.x == 0) a.not_finite[row] = 0;
}

// grid (rows, MLP / 512)
extern "C" __global__ void __launch_bounds__(128) gate_up_rows(const Args a) {
  release_next();
  wait_for_previous();
  const int row = blockIdx.x;
  const float s = row_factor(a, row);
  for (int i = blockIdx.y * 512 + threadIdx.x; i < min(MLP, blockIdx.y * 512 + 512); i += 128) {
    const float gate = mul(output(a, 2 * MLP, row, first_of_pair(i)), s);
    const float up = mul(output(a, 2 * MLP, row, first_of_pair(i) + 8), s);
    static_cast<bf16*>(a.out)[static_cast<int64>(row) * MLP + i] = to_bf16(mul(silu(gate), up));
  }
}

// grid (head rows, width / 4096): logits = y s in place, y being float32 [head rows, width] of one part.
extern "C" __global__ void __launch_bounds__(256) head_rows(const Args a) {
  release_next();
  wait_for_previous();
  const int row = a.row_ids == nullptr ? blockIdx.x : a.row_ids[blockIdx.x];
  const float s = row_factor(a, row);
  float* logits = static_cast<float*>(a.out) + static_cast<int64>(blockIdx.x) * a.width;
  for (int n = blockIdx.y * 4096 + threadIdx.x; n < min(a.width, blockIdx.y * 4096 + 4096); n += 256)
    logits[n] = mul(logits[n], s);
}
