#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep::detail {

inline bool went_well(NcclResult result) {
  return result == NcclResult::success || result == NcclResult::in_progress;
}

/// The tensors of a call as NCCL requires them: contiguous and not empty. Non-contiguous tensors are copied
/// on the communicator's stream, before and after the call. `written` and `read` are pairs if both are given;
/// `changed` tensors are read and written.
///
/// copy_in() alone allocates the copies, on the communicator's stream, once that stream is ordered after the
/// caller's. In a graph capture the stream has then joined the capture and the memory belongs to the graph. A
/// block allocated earlier could be in use elsewhere during a replay.
template <NcclDevice D>
class Operands {
 public:
  using Stream = typename D::Stream;

  Operands(const D& device, const Stream& stream) : device_(device), stream_(stream) {}

  void take(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read,
            const std::vector<at::Tensor>& changed) {
    add(written_, written);
    add(read_, read);
    add(changed_, changed);
  }

  [[nodiscard]] bool empty() const { return written_.empty() && read_.empty() && changed_.empty(); }

  /// Returns the caller's tensors.
  [[nodiscard]] std::vector<at::Tensor> own() const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(written_.size() + read_.size() + changed_.size());
    for (const auto* list : {&written_, &read_, &changed_})
      for (const Operand& operand : *list) tensors.push_back(operand.own);
    return tensors;
  }

  /// Makes the copies and adds them to `kept`.
  void copy_in(std::vector<at::Tensor>& kept) {
    for (auto* list : {&written_, &read_, &changed_})
      for (auto& [own, dense] : *list) {
        if (dense.defined()) continue;
        dense = device_.allocate(stream_, own.sizes(), own.scalar_type());
        kept.push_back(dense);
        if (list != &written_) device_.copy(stream_, dense, own);
      }
  }
  void copy_out() const {
    for (const auto* list : {&written_, &changed_})
      for (const auto& [own, dense] : *list)
        if (!own.is_same(dense)) device_.copy(stream_, own, dense);
  }

  // Each calls `issue` until a call fails, and returns the last result.
  template <class Issue>
  NcclResult for_each_changed(Issue&& issue) const {
    return for_each(changed_, issue);
  }
  template <class Issue>
  NcclResult for_each_read(Issue&& issue) const {
    return for_each(read_, issue);
  }
  template <class Issue>
  NcclResult for_each_written(Issue&& issue) const {
    return for_each(written_, issue);
  }
  template <class Issue>
  NcclResult for_each_pair(Issue&& issue) const {
    auto result = NcclResult::success;
    for (std::size_t i = 0; i < written_.size() && went_well(result); ++i)
      result = issue(written_[i].dense, read_[i].dense);
    return result;
  }

 private:
  struct Operand {
    at::Tensor own, dense;  // equal if `own` is contiguous; otherwise copy_in() sets `dense`
  };

  void add(std::vector<Operand>& operands, const std::vector<at::Tensor>& tensors) {
    operands.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors)
      if (tensor.numel() > 0) operands.push_back({tensor, tensor.is_contiguous() ? tensor : at::Tensor()});
  }
  template <class Issue>
  static NcclResult for_each(const std::vector<Operand>& operands, Issue&& issue) {
    auto result = NcclResult::success;
    for (std::size_t i = 0; i < operands.size() && went_well(result); ++i) result = issue(operands[i].dense);
    return result;
  }

  const D& device_;
  const Stream& stream_;
  std::vector<Operand> written_, read_, changed_;
};

}  // namespace lockstep::detail
