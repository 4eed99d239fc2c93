#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/detail/gloo_bytes.hpp"
#include "lockstep/comm/detail/gloo_group.hpp"
#include "lockstep/comm/detail/signature.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/detail/fnv1a.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Compares the signature `own` over the ranks before the collective sends anything. Throws the same
/// MismatchError on every rank.
inline void compare_over_ranks(GlooGroup& group, const Call& call, const std::string& own) {
  const auto gather = [&](const at::Tensor& row) {
    auto rows = at::empty({group.state().size(), row.numel()}, row.options());
    const auto work = start_all_gather(group.process_group(), rows, row);
    group.await(call, *work, call.start + group.timeout());
    return rows;
  };
  const auto length = static_cast<std::int64_t>(own.size());
  auto head = at::empty({2}, at::kLong);
  head.data_ptr<std::int64_t>()[0] = length;
  head.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(fnv1a(own));
  const auto heads = gather(head);
  if (heads.eq(head).all().item<bool>()) return;
  const auto longest = heads.select(1, 0).max().item<std::int64_t>();
  const auto texts = gather(bytes_tensor(own, longest));
  std::vector<std::string> signatures;
  for (int rank = 0; rank < group.state().size(); ++rank)
    signatures.push_back(bytes_in(texts[rank], heads[rank][0].item<std::int64_t>()));
  throw MismatchError(mismatch_text(call, signatures, group.state().ranks()));
}

}  // namespace lockstep::detail
