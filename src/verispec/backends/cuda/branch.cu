// Decides whether the body of a conditional node runs. Linked with the device runtime, which has the function it calls.
#include "arithmetic.cuh"

extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

struct BranchArgs {
  const int* busy;
  unsigned long long handle;
};

// One thread.
extern "C" __global__ void decide(const BranchArgs a) {
  vs::wait_for_previous();
  cudaGraphSetConditional(a.handle, *a.busy != 0);
}

// One thread: what stands behind a conditional node, which nobody can start ahead of.
extern "C" __global__ void go_on(const BranchArgs) {}
