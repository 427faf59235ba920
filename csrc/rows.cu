// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_replace_embeddings and aril_replace_logits: launches the kernels of trained rows.
#include "host/launch.cuh"
#include "linear/rows.cuh"

namespace aril {
namespace {

template <typename T>
struct Kernels {
  using Rows = Kernel<aril_rows_args>;
  Rows embeddings = {detail::replace_embeddings_kernel<T>, 0};
  Rows logits = {detail::replace_logits_kernel<T>, 0};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

}  // namespace

int32_t load_rows() {
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_replace_embeddings(const aril_rows_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(are_set(args->token_ids) && are_set(args->y));
  return dispatch(args->dtype, [&](auto element) {
    return launch(Kernels<decltype(element)>().embeddings, dim3(args->num_tokens),
                  detail::kRowsThreads, 0, stream, *args);
  });
}

extern "C" int32_t aril_replace_logits(const aril_rows_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(are_set(args->x) && are_set(args->y));
  return dispatch(args->dtype, [&](auto element) {
    return launch(Kernels<decltype(element)>().logits, dim3(args->blocks * args->max_tiles),
                  detail::kRowsThreads, 0, stream, *args);
  });
}
