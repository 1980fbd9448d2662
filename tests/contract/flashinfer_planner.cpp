// FlashInfer's own planner, compiled for a CPU and called from Python.
//
// The planner is host code in FlashInfer's headers; nothing of it is written here. CUDA
// is `cuda_stand_in.h`, and what `pos_enc.cuh` brings along are kernels, of which the
// planner asks for the names of one enumeration.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#define FLASHINFER_POS_ENC_CUH_
namespace flashinfer {
enum class PosEncodingMode { kNone = 0U, kRoPELlama = 1U, kALiBi = 2U };
}
#include <flashinfer/attention/scheduler.cuh>

namespace flashinfer {

// The planner asks how many of it run at once; it is never run.
template <PosEncodingMode, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
          typename AttentionVariant, typename Params>
void BatchDecodeWithPagedKVCacheKernel(const Params) {}

}  // namespace flashinfer

namespace {

using namespace flashinfer;
using Id = int32_t;

constexpr PosEncodingMode kPlain = PosEncodingMode::kNone;
std::string said;

struct Variant {};
template <typename Element>
struct DecodeParams {
  using IdType = Id;
  using DTypeKV = Element;
};

struct Workspace {
  void* floats;
  size_t float_bytes;
  void* ints;
  void* pinned;
  size_t int_bytes;
};

template <typename Plan>
int told(Plan plan, int64_t* info) {
  try {
    const std::vector<int64_t> facts = plan();
    std::copy(facts.begin(), facts.end(), info);
    return static_cast<int>(facts.size());
  } catch (const std::exception& error) {
    said = error.what();
    return -1;
  }
}

void check(cudaError_t status) {
  if (status != cudaSuccess) FLASHINFER_ERROR(cudaGetErrorString(status));
}

template <typename Element, uint32_t HEAD_DIM>
DecodePlanInfo decode_plan(Workspace at, Id* indptr, uint32_t batch_size,
                           uint32_t num_qo_heads, uint32_t num_kv_heads,
                           uint32_t page_size, bool graph) {
  using Params = DecodeParams<Element>;
  DecodePlanInfo info;
  DISPATCH_GQA_GROUP_SIZE(num_qo_heads / num_kv_heads, GROUP_SIZE, {
    check(DecodePlan<HEAD_DIM, kPlain, Variant, Params>(
        at.floats, at.float_bytes, at.ints, at.pinned, at.int_bytes, info, indptr,
        batch_size, num_qo_heads, page_size, graph, nullptr,
        BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP_SIZE, HEAD_DIM, kPlain,
                                                            Variant, Params>));
  });
  return info;
}

}  // namespace

extern "C" {

const char* planner_error() { return said.c_str(); }

void planner_device(int num_sm, int blocks_per_sm) {
  played_device.num_sm = num_sm;
  played_device.blocks_per_sm = blocks_per_sm;
}

int plan_prefill(void* floats, size_t float_bytes, void* ints, void* pinned,
                 size_t int_bytes, Id* qo_indptr, Id* kv_indptr, uint32_t total_num_rows,
                 uint32_t batch_size, uint32_t num_qo_heads, uint32_t num_kv_heads,
                 uint32_t head_dim_qk, uint32_t head_dim_vo, uint32_t page_size,
                 bool graph, int32_t window_left, int32_t fixed_split_size,
                 bool disable_split_kv, int64_t num_colocated_ctas,
                 int64_t uniform_q_len, uint32_t kv_bytes, int64_t* info) {
  return told(
      [&] {
        PrefillPlanInfo found;
        check(PrefillPlan<Id>(floats, float_bytes, ints, pinned, int_bytes, found,
                              qo_indptr, kv_indptr, total_num_rows, batch_size,
                              num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
                              page_size, graph, /*sizeof_dtype_o=*/2, window_left,
                              fixed_split_size, disable_split_kv, num_colocated_ctas,
                              uniform_q_len, /*stream=*/nullptr, kv_bytes));
        return found.ToVector();
      },
      info);
}

int plan_decode(void* floats, size_t float_bytes, void* ints, void* pinned,
                size_t int_bytes, Id* indptr, uint32_t batch_size, uint32_t num_qo_heads,
                uint32_t num_kv_heads, uint32_t page_size, bool graph, uint32_t head_dim,
                uint32_t kv_bytes, int64_t* info) {
  const Workspace at{floats, float_bytes, ints, pinned, int_bytes};
  return told(
      [&] {
        if (head_dim == 8 && kv_bytes == 4) {
          return decode_plan<float, 8>(at, indptr, batch_size, num_qo_heads, num_kv_heads,
                                       page_size, graph)
              .ToVector();
        }
        if (head_dim == 128 && kv_bytes == 2) {
          return decode_plan<uint16_t, 128>(at, indptr, batch_size, num_qo_heads,
                                            num_kv_heads, page_size, graph)
              .ToVector();
        }
        FLASHINFER_ERROR("no plan of this shape was compiled");
      },
      info);
}
}
