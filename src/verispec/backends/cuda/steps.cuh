// What both ends of a round share: where things stand in what the host sent, the records of sequences, and rows of a pass.
// `sent` begins with a header that says where its parts are; steps.py writes it. Each sequence has a record of 64 words.
#pragma once
#include "arithmetic.cuh"

using namespace vs;

constexpr int kThreads = 1024, kDumpSlot = 1, kRecordWords = 64, kMaxStops = 16;
enum Header {
  kRound, kBinds, kBindsAt, kUpdates, kUpdatesAt, kRowsAt, kTailWidth, kTailsAt, kGroups, kGroupsAt, kDraws, kDrawsAt, kFed,
  kFedAt, kMembers, kMembersAt, kOutWidth, kChains, kChainsAt, kOwners, kOwnersAt, kPasses, kPassesAt, kDraftersAt, kPass, kExtraAt
};
enum Record {
  kSeedLow, kSeedHigh, kSample, kTemperature, kTopK, kTopP, kLogMinP, kLimit, kNext, kLength, kMinLen, kPromptLen,
  kEdits, kPenalises, kCountsPrompt, kRepetition, kPresence, kFrequency = kPresence + 2, kNumBias = kFrequency + 2, kNumStops, kStops,
  kBias = kStops + kMaxStops  // pairs of id and value
};

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
  int* broken;            // [slots], 1 where K or V of the pass's model was not finite, and so is not there
  int* num_broken;        // of all models
  int* broken_rows;       // [head_rows], whether such a slot is in the context of a row that draws
  int* out;               // [rounds, 2, out width]: tokens, then log-probabilities
  int* busy;              // 0: the pass has no row but padding
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

// Behind the rows of a pass, by all threads of the block: whether any row of this one is not padding.
__device__ __forceinline__ void set_busy(const Args& a, bool has_rows) {
  has_rows = __syncthreads_or(has_rows);
  if (threadIdx.x == 0) *a.busy = has_rows;
}

__device__ __forceinline__ void set_padding(const Args& a, int row) { set_row(a, row, 0, 0, kDumpSlot, 0, 1, 0); }

// The row that a sequence goes on with; padding, whose context is the dump slot, if it has ended.
__device__ __forceinline__ void set_from_record(const Args& a, int row, int seq_row, bool goes_on) {
  const int* record = record_of(a, seq_row);
  const int token = record[kNext], position = record[kLength] - 1;
  if (goes_on && token >= 0)
    set_row(a, row, token, position, a.table[seq_row * a.table_width + position], seq_row, position + 1, position);
  else
    set_padding(a, row);
}

__device__ __forceinline__ void set_draw(const Args& a, int i, int row, int seq_row, int t, int stream, int mask) {
  const int* record = record_of(a, seq_row);
  a.row_ids[i] = row, a.masks[i] = mask;
  a.seeds[2 * i] = record[kSeedLow], a.seeds[2 * i + 1] = record[kSeedHigh];
  a.counters[3 * i] = t >= 0 ? t : a.positions[row] + 1, a.counters[3 * i + 1] = record[kSample], a.counters[3 * i + 2] = stream;
  a.temperature[i] = __int_as_float(record[kTemperature]), a.top_k[i] = record[kTopK];
  a.top_p[i] = __int_as_float(record[kTopP]), a.log_min_p[i] = __int_as_float(record[kLogMinP]);
}

// Whether a sequence has a further token to draw behind this one, with which it is `length` tokens long.
__device__ __forceinline__ bool goes_on(const int* record, int token, int length) {
  bool going = token >= 0 && length < record[kLimit];
  for (int i = 0; i < record[kNumStops]; ++i) going &= token != record[kStops + i] || length < record[kMinLen];
  return going;
}

// New sequences and new entries of the table: before anything reads them.
__device__ __forceinline__ void take_news(const Args& a) {
  const int* sent = a.sent;
  for (int i = threadIdx.x; i < sent[kBinds] * kRecordWords; i += kThreads) {
    const int* bind = sent + sent[kBindsAt] + i / kRecordWords * (kRecordWords + 1);
    record_of(a, bind[0])[i % kRecordWords] = bind[1 + i % kRecordWords];
  }
  const int updates = sent[kUpdates], *update = sent + sent[kUpdatesAt];
  for (int i = threadIdx.x; i < updates; i += kThreads)
    a.table[update[i] * a.table_width + update[updates + i]] = update[2 * updates + i];
  __syncthreads();
}

// Which slots are broken, from the rows that were written last. There are none, but with weights that are useless.
__device__ __forceinline__ void note_broken(const Args& a) {
  for (int i = threadIdx.x; i < a.rows; i += kThreads) {
    const int slot = a.slots[i], is_now = a.not_finite[i];
    if (slot == kDumpSlot || (!is_now && !__ldcg(a.num_broken))) continue;
    const int was = a.broken[slot];
    if (is_now != was) a.broken[slot] = is_now, atomicAdd(a.num_broken, is_now - was);
  }
  __syncthreads();
}

// Whether a row attends to a broken slot, its own included: what it draws is worth nothing. Behind note_broken.
__device__ __forceinline__ bool is_broken(const Args& a, int row) {
  if (!__ldcg(a.num_broken)) return false;
  const int prefix_len = a.prefix_lens[row], *slots = a.table + a.seq_rows[row] * a.table_width;
  bool found = false;
  for (int i = 0; i < prefix_len; ++i) found |= a.broken[slots[i]];
  for (int i = 0; i <= a.positions[row] - prefix_len; ++i) found |= a.broken[a.tails[static_cast<int64>(row) * a.tail_width + i]];
  return found;
}

// The token drawn at row `i` of the head, which is row `row` of the pass; -1 if there is none.
__device__ __forceinline__ int drawn_at(const Args& a, int i, int row) {
  const bool broken = is_broken(a, row);
  a.broken_rows[i] = broken;
  return broken ? -1 : a.drawn[i];
}
