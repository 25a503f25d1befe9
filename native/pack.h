// A matrix as a model file has it, and its packing for the kernels.
#pragma once
#include "api.h"

namespace vs {

// ggml's numbers of its types.
enum StoredType : int32_t {
  kStoredF32 = 0, kStoredF16 = 1, kStoredQ4_0 = 2, kStoredQ4_1 = 3, kStoredQ5_0 = 6, kStoredQ5_1 = 7, kStoredQ8_0 = 8,
  kStoredQ4_K = 12, kStoredQ5_K = 13, kStoredQ6_K = 14, kStoredBF16 = 30,
};

struct StoredMatrix {
  int32_t type, num_out, num_in;
  int32_t quantises;    // float weights become Q8_0
  const uint8_t* rows;  // one after the other, in any alignment
};

// Fills `out` with the groups of sixteen rows; adds to `num_bad` if a scale, or a float weight, is not finite.
void pack(Crew crew, const StoredMatrix& m, uint8_t* out, int32_t* num_bad);

}  // namespace vs
