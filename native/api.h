// The C interface of the kernels. Plain data in, plain data out; Python owns every buffer and checks every bound.
//
// kernels.cpp and hopper.cpp, an arithmetic each, are compiled once per instruction set; each copy fills one table of
// functions, and api.cpp picks a table at run time. All copies give the same bits: integer dot products are exact, float sums run in one
// order that the source spells out, every float operation is one IEEE operation (no contraction into fma), and exp, log,
// sin and cos are our own.
#pragma once
#include <cstddef>
#include <cstdint>

#define VS_API extern "C" __attribute__((visibility("default")))

namespace vs {

constexpr int kLanes = 16;   // output columns that are packed, and computed, together
constexpr int kBlock = 32;   // values of a row that are quantised with one scale

// How a matrix's weights are kept. Affine formats add a minimum per block: w = d * q + m.
enum Format : int32_t {
  kF32 = 0,     // [N / 16][K][16] float
  kF16 = 1,     // the same, float16 bits
  kBF16 = 2,    // the same, bfloat16 bits
  kQ4 = 3,      // 4-bit, float16 scales, w = d * (q - 8)
  kQ4Affine = 4,       // 4-bit, float16 scales and minima
  kQ4AffineWide = 5,   // 4-bit, float32 scales and minima
  kQ8 = 6,      // 8-bit, float16 scales
  kQ8Wide = 7,  // 8-bit, float32 scales
  kQ8AffineWide = 8,   // 8-bit, float32 scales and minima
  kQ8Halves = 9,       // 8-bit, float32 scales, one per 16 values
};

// y[M][N] = x[M][K] W^T. `data` is packed for `format`; columns behind N are zero.
struct Matrix {
  int32_t format;
  int32_t num_out;  // N
  int32_t num_in;   // K
  const void* data;
};

// What defines every bit of a pass: the CPU's own, or that of a Hopper GPU, which takes kBF16 matrices and bf16 K/V.
enum ArithmeticId : int32_t { kCpu = 0, kHopper = 1 };

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *attn_norm, *mlp_norm;
  const float* qkv_bias;  // or null
  const float *q_norm, *k_norm;  // or null
  const float *attn_post_norm, *mlp_post_norm;  // or null
  const float* cos_sin;  // [context][head_dim]: cosines, then sines
  float query_scalar;    // scores are divided by its square root
  int32_t window;        // positions a row sees, its own included; 0: all
  int32_t activation;
};

struct Model {
  int32_t arithmetic, num_layers, hidden, num_heads, num_kv_heads, head_dim, mlp, vocab, kv_is_half;
  float norm_eps, embed_scale;
  const Layer* layers;
  const float* final_norm;
  Matrix head;
  Matrix embed;  // the head itself where they are tied
};

// The rows of a pass, as in the Python protocol.
struct Rows {
  int32_t num_rows, tail_width, table_width;
  const int32_t *token_ids, *positions, *slots, *seq_rows, *prefix_lens, *tails, *tail_lens, *table;
};

// K and V of all layers, [layers][slots][kv_heads][head_dim padded to 16], float, or float16 or bf16 bits.
struct Store {
  void *k, *v;
  int64_t slots_per_layer;
};

// What turns a row's logits into log-probabilities: the largest, and log of the sum of exp(l - top). NaN for a row with NaN
// in it or without a finite maximum.
struct Totals {
  float top, log_total;
};

// Sampling inputs of one pass: arrays per row, sparse edits with their rows ascending.
struct Sampling {
  int32_t num_rows, num_penalties, num_bias, mask_words;
  const uint64_t* seeds;
  const int64_t *t, *sample_index, *stream, *top_k;
  const float *temperature, *top_p, *log_min_p;
  const int64_t *penalty_rows, *penalty_ids;
  const float *repetition, *penalty;
  const int64_t *bias_rows, *bias_ids;
  const float* bias;
  const int64_t* masks;     // row of `allowed` for each row, 0 for none; or null
  const uint32_t* allowed;  // [masks][mask_words]: bit i % 32 of word i / 32 allows token i
};

// Rounds of some sequences, whose draws are fed back. `tokens` and `t`, the last token of each and its position, move on;
// `slot_tokens` has the tokens before it, by the slots of their positions. A sequence has `rounds` of them at most, and idles
// behind a stop id, its limit or a draw that failed: its token is then -1. Round r of sequence i drafted drafts[i][r], up to
// the first -1, of which `accepted` were drawn.
struct Burst {
  int32_t num_sequences, num_rounds, num_stop_ids, max_draft;
  int32_t first_round, end_round;  // which of the rounds run now; from a later one on only if nobody drafts
  const int32_t *seq_rows, *rounds, *draft_lens;
  const int64_t *stop_ids, *min_lens, *limits;  // [sequences][num_stop_ids], [sequences], [sequences]
  int64_t *tokens, *t;
  int32_t* slot_tokens;
  int64_t* drawn;     // [sequences][num_rounds * (1 + max_draft)], one round behind the other
  float* logprobs;    // the same
  int64_t* drafts;    // [sequences][num_rounds][max_draft]
  int32_t* accepted;  // [sequences][num_rounds]
};

// What drafts in a burst: chains end behind a token whose log-probability is below `least_logprob`. The first pass of a
// round has `first_rows` rows of each sequence, the last committed tokens. Without a model chains are looked up.
struct Drafting {
  const Model* model;
  const Store* store;
  const uint8_t *skip_attention, *skip_mlp;
  int32_t first_rows;
  float least_logprob;
};

// A pass is a sequence of phases; the work of a phase is cut into chunks that threads take one by one. A thread that the
// system has put aside holds up nobody but the chunk it has: the others go on when all chunks are done, and it catches up.
struct Phase {
  int32_t next, done;
  char padding[56];  // a cache line each
};

struct Crew {
  int tid, num_threads;
  Phase* phase;  // the next one; every thread walks through all of them
};

struct Arithmetic {
  int (*num_phases)(const Model&);
  size_t (*scratch_nbytes)(const Model&, int num_rows, int num_threads, int max_context);
  void (*forward)(Crew, const Model&, const Rows&, const Store&, const uint8_t* skip_attention, const uint8_t* skip_mlp,
                  float* x, int first, int end, void* scratch);
  void (*logits)(Crew, const Model&, const float* x, int num_rows, float* y, Totals* totals, void* scratch);
  void (*linear)(Crew, const Matrix&, const float* x, int num_rows, float* y, void* scratch);
  void (*activate)(Crew, int activation, const float* gate_up, int num_rows, int mlp, float* y);
  void (*attend)(Crew, const Model&, const Rows&, const Store&, int layer, const float* q, float* out, void* scratch);
};

struct Table {
  const char* name;
  const Arithmetic *cpu, *hopper;
  void (*norm)(Crew, const float* x, const float* weight, int num_rows, int width, float eps, float* y);
  void (*totals)(Crew, const float* logits, int num_rows, int vocab, Totals* out);
  void (*draw)(Crew, const float* logits, const int32_t* logit_rows, const Totals* totals, int vocab, const Sampling&,
               int64_t* token_ids, float* logprobs, float* scratch);
  void (*top_k)(Crew, const float* logits, const int32_t* logit_rows, int num_rows, int vocab, int k, int64_t* token_ids,
                float* values);
  void (*noisy_top_k)(Crew, const float* logits, const int32_t* logit_rows, int vocab, const Sampling&, int k,
                      int64_t* token_ids, float* values, float* logprobs, float* scratch);
  void (*elementary)(Crew, int which, const float* x, int64_t count, float* y);
};

void relax(int spins);  // in api.cpp: wait a moment, then let others run

}  // namespace vs
