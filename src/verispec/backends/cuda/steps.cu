// The two ends of a round: what the host sent becomes the inputs of a pass, and what was drawn becomes results and state.
// Both run as one block: a round has few rows, and the second half of each kernel needs all of the first.
// `sent` begins with a header that says where its parts are; steps.py writes it. Each sequence has a record of 32 words.
#include "arithmetic.cuh"

using namespace vs;

constexpr int kThreads = 1024, kDumpSlot = 1, kRecordWords = 32, kMaxStops = 16;
enum Header {
  kRound, kBinds, kBindsAt, kUpdates, kUpdatesAt, kRowsAt, kTailWidth, kTailsAt, kGroups, kGroupsAt, kDraws, kDrawsAt, kFed,
  kFedAt, kMembers, kMembersAt, kOutWidth
};
enum Record { kSeedLow, kSeedHigh, kSample, kTemperature, kTopK, kTopP, kLogMinP, kLimit, kNext, kLength, kBroken, kNumStops, kStops };

struct Args {
  int* sent;
  int* records;       // [sequence rows, kRecordWords]
  int* table;         // [sequence rows, table_width]
  int* slot_tokens;   // [slots], the token whose K/V a slot holds
  int* token_ids;     // the inputs of a pass, [rows] each
  int* positions;
  int* slots;
  int* seq_rows;
  int* prefix_lens;
  int* ready_lens;
  int* tails;         // [rows, tail_width]
  int* groups;        // [num_groups, 2]
  int* row_ids;       // [head_rows]
  unsigned* seeds;    // [head_rows, 2]
  unsigned* counters; // [head_rows, 3]
  float* temperature;
  int* top_k;
  float* top_p;
  float* log_min_p;
  int* masks;
  const int* drawn;       // [head_rows]
  const float* logprobs;  // [head_rows]
  const int* not_finite;  // [rows]
  int* out;               // [rounds, 2, out width]: tokens, then log-probabilities
  int64 table_width;
  int tail_width;
  int rows;
  int num_groups;
  int head_rows;
  int is_round;  // the rows are those of the members, one each, from where their records say they are
};

__device__ __forceinline__ int* record_of(const Args& a, int seq_row) { return a.records + static_cast<int64>(seq_row) * kRecordWords; }

__device__ __forceinline__ void set_row(const Args& a, int row, int token, int position, int slot, int seq_row, int prefix_len, int ready_len) {
  a.token_ids[row] = token, a.positions[row] = position, a.slots[row] = slot;
  a.seq_rows[row] = seq_row, a.prefix_lens[row] = prefix_len, a.ready_lens[row] = ready_len;
  a.slot_tokens[slot] = token;
}

// The row that a sequence goes on with; padding, whose context is the dump slot, if it has ended.
__device__ __forceinline__ void set_from_record(const Args& a, int row, int seq_row, bool goes_on) {
  const int* record = record_of(a, seq_row);
  const int token = record[kNext], position = record[kLength] - 1;
  if (goes_on && token >= 0)
    set_row(a, row, token, position, a.table[seq_row * a.table_width + position], seq_row, position + 1, position);
  else
    set_row(a, row, 0, 0, kDumpSlot, 0, 1, 0);
}

__device__ __forceinline__ void set_draw(const Args& a, int i, int row, int seq_row, int t, int stream, int mask) {
  const int* record = record_of(a, seq_row);
  a.row_ids[i] = row, a.masks[i] = mask;
  a.seeds[2 * i] = record[kSeedLow], a.seeds[2 * i + 1] = record[kSeedHigh];
  a.counters[3 * i] = t >= 0 ? t : a.positions[row] + 1, a.counters[3 * i + 1] = record[kSample], a.counters[3 * i + 2] = stream;
  a.temperature[i] = __int_as_float(record[kTemperature]), a.top_k[i] = record[kTopK];
  a.top_p[i] = __int_as_float(record[kTopP]), a.log_min_p[i] = __int_as_float(record[kLogMinP]);
}

// One block. It releases nobody early, and the embedding behind it waits: everything below reads what stands here.
extern "C" __global__ void __launch_bounds__(kThreads) begin_round(const Args a) {
  wait_for_previous();
  const int* sent = a.sent;
  const int round = sent[kRound];
  if (round == 0) {
    for (int i = threadIdx.x; i < sent[kBinds] * kRecordWords; i += kThreads) {
      const int* bind = sent + sent[kBindsAt] + i / kRecordWords * (kRecordWords + 1);
      record_of(a, bind[0])[i % kRecordWords] = bind[1 + i % kRecordWords];
    }
    const int updates = sent[kUpdates], *update = sent + sent[kUpdatesAt];
    for (int i = threadIdx.x; i < updates; i += kThreads)
      a.table[update[i] * a.table_width + update[updates + i]] = update[2 * updates + i];
    __syncthreads();
  }
  if (a.is_round) {
    const int members = sent[kMembers], *member = sent + sent[kMembersAt];
    for (int i = threadIdx.x; i < a.rows; i += kThreads) {
      const int seq_row = i < members ? member[i] : 0, token = i < members ? member[2 * members + i] : -1;
      const bool goes_on = i < members && round <= member[members + i];
      if (round == 0 && token >= 0) {
        int* record = record_of(a, seq_row);
        record[kNext] = token, record[kLength] = member[3 * members + i] + 1;
      }
      set_from_record(a, i, seq_row, goes_on);
      set_draw(a, i, i, a.seq_rows[i], -1, 0, 0);  // of this thread's own row
    }
    return;
  }
  const int* column = sent + sent[kRowsAt];  // tokens, positions, slots, sequences, lengths of prefixes and of what is ready
  const int width = sent[kTailWidth], n = a.rows;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int seq_row = column[3 * n + i];
    if (column[i] < 0) set_from_record(a, i, seq_row, true);
    else set_row(a, i, column[i], column[n + i], column[2 * n + i], seq_row, column[4 * n + i], column[5 * n + i]);
  }
  for (int i = threadIdx.x; i < n * width; i += kThreads)
    a.tails[i / width * a.tail_width + i % width] = sent[sent[kTailsAt] + i];
  for (int i = threadIdx.x; i < 2 * a.num_groups; i += kThreads)
    a.groups[i] = i < 2 * sent[kGroups] ? sent[sent[kGroupsAt] + i] : 0;
  __syncthreads();
  const int draws = sent[kDraws], *draw = sent + sent[kDrawsAt];
  for (int i = threadIdx.x; i < a.head_rows; i += kThreads) {
    if (i < draws) set_draw(a, i, draw[i], a.seq_rows[draw[i]], draw[draws + i], draw[2 * draws + i], draw[3 * draws + i]);
    else set_draw(a, i, 0, 0, 0, 0, 0);  // padding draws greedily
  }
}

// The token drawn at row i of the head as the sequence's next, if it has a next.
__device__ __forceinline__ void remember(const Args& a, int row, int token) {
  int* record = record_of(a, a.seq_rows[row]);
  const int length = a.positions[row] + 2;
  bool goes_on = token >= 0 && length < record[kLimit];
  for (int i = 0; i < record[kNumStops]; ++i) goes_on &= token != record[kStops + i];
  record[kNext] = goes_on ? token : -1;
  record[kLength] = length;
}

// One block. A sequence with a row whose K or V was not finite draws nothing any more.
extern "C" __global__ void __launch_bounds__(kThreads) end_round(const Args a) {
  wait_for_previous();
  int* sent = a.sent;
  for (int i = threadIdx.x; i < a.rows; i += kThreads)
    if (a.not_finite[i]) record_of(a, a.seq_rows[i])[kBroken] = 1;
  __syncthreads();
  const int round = sent[kRound], width = sent[kOutWidth], count = a.is_round ? sent[kMembers] : sent[kDraws];
  int* tokens = a.out + static_cast<int64>(round) * 2 * width;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int row = a.row_ids[i];
    const bool is_padding = a.slots[row] == kDumpSlot;
    const int token = is_padding || record_of(a, a.seq_rows[row])[kBroken] ? -1 : a.drawn[i];
    tokens[i] = token;
    tokens[width + i] = is_padding ? 0 : __float_as_int(a.logprobs[i]);
    if (a.is_round && !is_padding) remember(a, row, token);
  }
  __syncthreads();
  if (!a.is_round)
    for (int i = threadIdx.x; i < sent[kFed]; i += kThreads) {
      const int at = sent[sent[kFedAt] + i], row = a.row_ids[at];
      if (a.slots[row] != kDumpSlot) remember(a, row, tokens[at]);
    }
  if (threadIdx.x == 0) sent[kRound] = round + 1;
}
