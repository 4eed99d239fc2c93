#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/grad/detail/backward_report.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Labels collectives with their bucket, for a Labelled communicator that reports errors asynchronously. A
/// no-op for other communicators. The labels are formatted once per plan.
template <class Comm>
class BucketLabels {
 public:
  template <class Buckets>
  void name([[maybe_unused]] const Buckets& buckets,
            [[maybe_unused]] const std::vector<NamedTensor>& parameters) {
    if constexpr (Labelled<Comm>) {
      labels_.clear();
      for (std::size_t b = 0; b < buckets.size(); ++b)
        labels_.push_back(std::make_shared<const std::string>(
            detail::formatted("bucket {} of {}, with {}", b + 1, buckets.size(),
                              parameter_list(buckets.members(b), parameters))));
    }
  }

  /// Labels the collectives that are launched in its scope.
  class Use {
   public:
    Use(Comm& comm, const std::shared_ptr<const std::string>& label) : comm_(comm) {
      if constexpr (Labelled<Comm>) comm_.label(label);
    }
    ~Use() {
      if constexpr (Labelled<Comm>) comm_.label(nullptr);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Comm& comm_;
  };
  [[nodiscard]] Use use(Comm& comm, std::size_t bucket) const {
    return Use(comm, labels_.empty() ? nullptr : labels_[bucket]);
  }

 private:
  std::vector<std::shared_ptr<const std::string>> labels_;
};

}  // namespace lockstep::detail
