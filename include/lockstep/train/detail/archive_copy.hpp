#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/archive.h>

namespace lockstep::inline v0_1::detail {

/// Returns the module that holds what was written to an archive. LibTorch has no accessor: an explicit instantiation may name a
/// private member. The class that it instantiates, in each translation unit, has no members.
const torch::jit::Module& content_of(const torch::serialize::OutputArchive& archive);
template <torch::jit::Module torch::serialize::OutputArchive::*content>
struct ArchiveContent {
  friend const torch::jit::Module& content_of(const torch::serialize::OutputArchive& archive) {
    return archive.*content;
  }
};
template struct ArchiveContent<&torch::serialize::OutputArchive::module_>;

/// Copies the tensors of an archive, so that it can be written while the tensors change. The copies of the next archive lie in
/// the same memory, since fresh memory takes longer than the copy: the last one must be written by then.
class ArchiveCopy {
 public:
  /// Replaces the tensors of the archive by copies. Those that share memory still do, so that the file has the same bytes; only
  /// tensors within other values, such as lists and dicts, are copied one by one.
  void detach(const torch::serialize::OutputArchive& archive) {
    const at::NoGradGuard no_grad;
    tensors_.clear();  // after a copy that has failed, too
    storages_.clear();
    referenced_.clear();
    const auto content = content_of(archive)._ivalue();
    unit_ = content->compilation_unit();
    detach(*content);
    for (const at::Device device :
         std::exchange(devices_, {}))  // the thread that writes has streams of its own
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
    memory_.resize(storages_.size());
    tensors_.clear();
  }

 private:
  void detach(c10::ivalue::Object& object) {
    for (std::size_t i = 0; i < object.slots().size(); ++i) {
      const c10::IValue& value = object.slots()[i];
      if (value.isObject() && value.toObject()->compilation_unit() == unit_) {  // a nested archive
        detach(*value.toObject());
        continue;
      }
      // A pickle marks the values that are referenced elsewhere, too: of these keep another reference.
      const bool is_referenced = value.use_count() > 1;
      c10::IValue copy = value.isTensor() ? c10::IValue(once_copied(value.toTensor())) : value.deepcopy();
      if (is_referenced) referenced_.push_back(copy);
      object.setSlot(i, std::move(copy));
    }
  }
  // A tensor that was written twice is one copy.
  at::Tensor once_copied(const at::Tensor& tensor) {
    const auto [found, is_new] = tensors_.try_emplace(tensor.unsafeGetTensorImpl());
    if (is_new) found->second = copy_of(tensor);
    return found->second;
  }
  at::Tensor copy_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_quantized() ||
        tensor.is_conj() || tensor.is_neg())
      return tensor.clone().set_requires_grad(tensor.requires_grad());
    const auto [found, is_new] =
        storages_.try_emplace(tensor.storage().unsafeGetStorageImpl(), tensor.storage());
    if (is_new) found->second = copy_of(tensor.storage(), tensor.device());
    return at::empty({0}, tensor.options().requires_grad(false))
        .set_(found->second, tensor.storage_offset(), tensor.sizes(), tensor.strides())
        .set_requires_grad(tensor.requires_grad());
  }
  at::Storage copy_of(const at::Storage& storage, at::Device device) {
    const auto bytes = at::TensorOptions(at::kByte).device(device);
    const auto size = static_cast<std::int64_t>(storage.nbytes());
    if (memory_.size() < storages_.size()) memory_.emplace_back();
    at::Tensor& copy = memory_[storages_.size() - 1];
    if (!copy.defined() || copy.numel() != size || copy.device() != device) copy = at::empty({size}, bytes);
    const at::Tensor from = at::empty({0}, bytes).set_(storage, 0, {size}, {1});
    if (!device.is_cpu()) {
      copy.copy_(from);
      devices_.insert(device);
    } else  // copy_ is slower: it also reads what it writes to
      at::parallel_for(0, size, 1 << 20, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(static_cast<char*>(copy.mutable_data_ptr()) + begin,
                    static_cast<const char*>(from.const_data_ptr()) + begin,
                    static_cast<std::size_t>(end - begin));
      });
    return copy.storage();
  }

  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors_;     // the copies
  std::unordered_map<const c10::StorageImpl*, at::Storage> storages_;  // the copies
  std::vector<c10::IValue> referenced_;                                // copies
  std::vector<at::Tensor> memory_;                     // of storages_, in the order of their copies
  std::unordered_set<at::Device> devices_;             // to which copies are under way
  std::shared_ptr<torch::jit::CompilationUnit> unit_;  // of the archive
};

}  // namespace lockstep::inline v0_1::detail
