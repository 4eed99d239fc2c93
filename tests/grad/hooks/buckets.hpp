#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "grad/models.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/hooks/hook.hpp"

using Shapes = std::vector<std::vector<std::int64_t>>;
using Plan = std::vector<Shapes>;

/// Buckets as a reducer keeps them: the same memory in every step.
class Buckets {
 public:
  /// One list of shapes for each bucket; parameters are counted through.
  explicit Buckets(const Plan& plan, torch::Dtype type = torch::kFloat) {
    std::size_t parameter = 0;
    for (const Shapes& shapes : plan) {
      lockstep::GradientBucket bucket;
      bucket.index = static_cast<std::int64_t>(buckets_.size());
      bucket.count = static_cast<std::int64_t>(plan.size());
      std::int64_t length = 0;
      for (const auto& shape : shapes) length += c10::multiply_integers(shape);
      bucket.flat = torch::zeros({length}, type);
      std::int64_t offset = 0;
      for (const auto& shape : shapes) {
        const std::int64_t numel = c10::multiply_integers(shape);
        bucket.gradients.push_back(bucket.flat.narrow(0, offset, numel).view(shape));
        bucket.parameters.push_back(parameter++);
        offset += numel;
      }
      buckets_.push_back(std::move(bucket));
    }
  }

  /// This rank's gradients, one flat tensor for each bucket, as they are after the reduction.
  template <class Hook, class Comm>
  std::vector<torch::Tensor> reduce(Hook& hook, Comm& comm, const std::vector<torch::Tensor>& gradients) {
    static_assert(lockstep::CommunicationHook<Hook, Comm>);
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      buckets_[b].iteration = iteration_;
      buckets_[b].flat.copy_(gradients[b]);
    }
    ++iteration_;
    using Handle = decltype(hook.start(comm, buckets_[0]));
    std::vector<Handle> under_way;
    under_way.reserve(buckets_.size());
    for (const auto& bucket : buckets_) under_way.push_back(hook.start(comm, bucket));
    for (std::size_t b = 0; b < under_way.size(); ++b) {
      // Both ways to wait.
      if (b % 2 == 0)
        under_way[b].wait();
      else
        under_way[b].synchronize(std::chrono::seconds(60));
    }
    std::vector<torch::Tensor> averages;
    for (const auto& bucket : buckets_) averages.push_back(bucket.flat.clone());
    return averages;
  }

  [[nodiscard]] std::size_t size() const { return buckets_.size(); }
  [[nodiscard]] const lockstep::GradientBucket& operator[](std::size_t b) const { return buckets_[b]; }

  /// Made-up gradients of a rank in a step: any rank can make those of all.
  [[nodiscard]] std::vector<torch::Tensor> gradients_of(int rank, int step) const {
    std::vector<torch::Tensor> gradients;
    torch::manual_seed(100 * step + rank + 1);
    for (const auto& bucket : buckets_) gradients.push_back(torch::randn_like(bucket.flat));
    return gradients;
  }
  [[nodiscard]] std::vector<torch::Tensor> mine(int step) const {
    return gradients_of(test_world().rank(), step);
  }
  /// Their exact average, float64.
  [[nodiscard]] std::vector<torch::Tensor> average(int step) const {
    std::vector<torch::Tensor> sums;
    const int ranks = test_world().size();
    for (int rank = 0; rank < ranks; ++rank) {
      const auto gradients = gradients_of(rank, step);
      for (std::size_t b = 0; b < gradients.size(); ++b) {
        const auto part = gradients[b].to(torch::kDouble) / ranks;
        if (rank == 0)
          sums.push_back(part);
        else
          sums[b] += part;
      }
    }
    return sums;
  }

 private:
  std::vector<lockstep::GradientBucket> buckets_;
  std::int64_t iteration_ = 0;
};

/// Equal bits, those of a not-a-number included.
inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  const auto one = a.contiguous(), other = b.contiguous();
  return one.sizes() == other.sizes() && one.dtype() == other.dtype() &&
         std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}
inline bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!same_bits(a[i], b[i])) return false;
  return true;
}

/// Whether every rank has the same bits. Collective.
inline bool same_on_all_ranks(const torch::Tensor& tensor) {
  auto all = torch::empty({test_world().size(), static_cast<std::int64_t>(tensor.nbytes())}, torch::kByte);
  shared_comm().all_gather(all, tensor.contiguous().view({-1}).view(torch::kByte)).synchronize();
  bool same = true;
  for (int rank = 1; rank < test_world().size(); ++rank) same = same && all[rank].equal(all[0]);
  return same;
}

inline double relative_error(const torch::Tensor& actual, const torch::Tensor& expected) {
  const auto exact = expected.to(torch::kDouble);
  return ((actual.to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

/// What `bytes` become in a group of this size: alone, nothing travels.
inline std::int64_t on_the_wire(std::int64_t bytes) {
  return test_world().size() > 1 ? bytes : 0;
}
