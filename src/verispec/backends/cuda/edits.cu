// What requests change of their logits before a draw, as verispec/sampling/draw.py `process` does it: penalties for the tokens
// of a row's own context, bias, and stop ids that come too early. One block for each row that draws.
#include "steps.cuh"

constexpr int kEditThreads = 256, kInPrompt = 1 << 30;

struct EditArgs {
  Args step;
  float* edited;  // [rows, vocab], in: the raw logits
  int* counts;    // [rows, vocab], zero between draws: how often a token is in the output, and whether in the prompt
  int vocab;
};

__device__ __forceinline__ double double_of(const int* words) {
  return __hiloint2double(words[1], words[0]);
}

extern "C" __global__ void __launch_bounds__(kEditThreads) edit_rows(const EditArgs e) {
  release_next();
  wait_for_previous();
  const Args& a = e.step;
  const int row = a.row_ids[blockIdx.x], seq_row = a.seq_rows[row], length = a.positions[row] + 1, prefix_len = a.prefix_lens[row];
  const int* record = record_of(a, seq_row);
  float* logits = e.edited + static_cast<int64>(blockIdx.x) * e.vocab;
  int* counts = e.counts + static_cast<int64>(blockIdx.x) * e.vocab;
  if (!record[kEdits]) return;
  const auto token_at = [&](int j) {
    return a.slot_tokens[j < prefix_len ? a.table[seq_row * a.table_width + j] : a.tails[static_cast<int64>(row) * a.tail_width + j - prefix_len]];
  };
  if (record[kPenalises]) {
    const int prompt_len = record[kPromptLen], first = record[kCountsPrompt] ? 0 : prompt_len;
    const float repetition = __int_as_float(record[kRepetition]);
    const double presence = double_of(record + kPresence), frequency = double_of(record + kFrequency);
    for (int j = first + threadIdx.x; j < length; j += kEditThreads)
      if (j < prompt_len) atomicOr(&counts[token_at(j)], kInPrompt);
      else atomicAdd(&counts[token_at(j)], 1);
    __syncthreads();
    for (int j = first + threadIdx.x; j < length; j += kEditThreads) {
      const int token = token_at(j), count = atomicExch(&counts[token], 0), num_output = count & (kInPrompt - 1);
      if (count == 0) continue;  // another of its places has it
      const float v = logits[token], amount = num_output ? __double2float_rn(__dadd_rn(presence, __dmul_rn(frequency, num_output))) : 0.0f;
      logits[token] = sub(v > 0.0f ? div(v, repetition) : mul(v, repetition), amount);
    }
    __syncthreads();
  }
  const bool is_early = length < record[kMinLen];
  for (int i = threadIdx.x; i < record[kNumBias]; i += kEditThreads) {
    const int id = record[kBias + 2 * i];
    bool is_banned = false;
    for (int k = 0; k < record[kNumStops]; ++k) is_banned |= is_early && record[kStops + k] == id;
    if (!is_banned) logits[id] = add(logits[id], __int_as_float(record[kBias + 2 * i + 1]));
  }
  for (int i = threadIdx.x; is_early && i < record[kNumStops]; i += kEditThreads)
    logits[record[kStops + i]] = add(logits[record[kStops + i]], neg_inf());
}
