// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_pack: factors in device memory to the layout of aril_descriptor.
#include "device/pack.cuh"
#include "host/launch.cuh"

namespace aril {
namespace {

using detail::kPackBlockRows;
using detail::kPackThreads;
using detail::pack_kernel;

// By source type.
template <typename T>
struct Pack {
  Kernel<aril_pack_args> bf16 = {pack_kernel<T, __nv_bfloat16>, 0};
  Kernel<aril_pack_args> f16 = {pack_kernel<T, __half>, 0};
  Kernel<aril_pack_args> f32 = {pack_kernel<T, float>, 0};

  int32_t load_all() const { return load_table(bf16, f16, f32); }
  const Kernel<aril_pack_args>& of(__nv_bfloat16) const { return bf16; }
  const Kernel<aril_pack_args>& of(__half) const { return f16; }
  const Kernel<aril_pack_args>& of(float) const { return f32; }
};

template <typename T>
constexpr Pack<T> kPack = {};

}  // namespace

int32_t load_pack() {
  ARIL_TRY(kPack<__nv_bfloat16>.load_all());
  ARIL_TRY(kPack<__half>.load_all());
  return kPack<float>.load_all();
}

}  // namespace aril

extern "C" int32_t aril_pack(const aril_pack_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(args->num_factors > 0 && args->num_factors <= ARIL_PACK_FACTORS);
  ARIL_CHECK(are_set(args->not_finite));
  aril_pack_args numbered = *args;
  int blocks = 0;
  for (int i = 0; i < args->num_factors; ++i) {
    ARIL_CHECK(are_set(args->factors[i].source, args->factors[i].target));
    ARIL_CHECK(args->factors[i].kind >= ARIL_PACK_A &&
               args->factors[i].kind <= ARIL_PACK_EMBEDDING_A);
    numbered.factors[i].first_block = blocks;
    blocks += (numbered.factors[i].core_rows + kPackBlockRows - 1) / kPackBlockRows;
  }
  return dispatch(args->dtype, [&](auto target) {
    return dispatch(args->source_dtype, [&](auto source) {
      return launch(kPack<decltype(target)>.of(source), blocks, kPackThreads, 0, stream, numbered);
    });
  });
}
