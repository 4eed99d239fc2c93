#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// The communicator of a model whose parts are on several devices of each rank. Tensors on the device of one
/// of the `Device` communicators go through that communicator. All other tensors, bytes and barriers go
/// through `Host`.
///
///   CommByDevice comm{GlooComm{world}, NcclComm{world, {.device = 0}}, NcclComm{world, {.device = 1}}};
///   DistributedDataParallel ddp{model_of_three_parts, comm};
///
/// Every rank passes the same devices in the same order, since constructing a communicator is collective. The
/// tensors of one list must be on one device; otherwise the call throws UsageError. DistributedDataParallel
/// reduces a model on several devices bucket by bucket, and each bucket is on one device.
template <class Host, DeviceCommunicator Device>
requires Reducing<Host> && Gathering<Host> && Reducing<Device> && Gathering<Device>
class CommByDevice {
 public:
  /// The Work of the communicator that runs the collective.
  class [[nodiscard]] Work {
   public:
    template <class One>
    explicit Work(One work) : work_(std::move(work)) {}
    void wait() {
      std::visit([](auto& work) { work.wait(); }, work_);
    }
    void synchronize() {
      std::visit([](auto& work) { work.synchronize(); }, work_);
    }
    void synchronize(std::chrono::milliseconds timeout) {
      std::visit([&](auto& work) { work.synchronize(timeout); }, work_);
    }
    [[nodiscard]] std::exception_ptr error() const {
      return std::visit([](const auto& work) { return work.error(); }, work_);
    }

   private:
    std::variant<typename Host::Work, typename Device::Work> work_;
  };

  /// Throws UsageError if the communicators differ in rank or size, or if two of them have the same device.
  template <class... More>
  requires(std::same_as<More, Device>&&...) explicit CommByDevice(Host host, Device first, More... more)
      : host_(std::move(host)) {
    devices_.push_back(std::move(first));
    (devices_.push_back(std::move(more)), ...);
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      if (devices_[i].rank() != host_.rank() || devices_[i].size() != host_.size())
        throw UsageError(detail::formatted(
            "CommByDevice: rank {} of {} on the host is rank {} of {} on {}: give it groups of "
            "the same ranks",
            host_.rank(), host_.size(), devices_[i].rank(), devices_[i].size(),
            devices_[i].tensor_device().str()));
      for (std::size_t j = 0; j < i; ++j)
        if (devices_[i].tensor_device() == devices_[j].tensor_device())
          throw UsageError(
              detail::formatted("CommByDevice: two communicators of {}: give it one for each device",
                                devices_[i].tensor_device().str()));
    }
  }

  [[nodiscard]] int rank() const { return host_.rank(); }
  [[nodiscard]] int size() const { return host_.size(); }
  [[nodiscard]] const World& world() const { return host_.world(); }
  [[nodiscard]] int world_rank(int rank) const requires requires(const Host& host) { host.world_rank(0); }
  { return host_.world_rank(rank); }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    return on(tensor, [&](auto& comm) { return comm.all_reduce(tensor, op); });
  }
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    return on(list, [&](auto& comm) { return comm.all_reduce(list, op); });
  }
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return on(tensor, [&](auto& comm) { return comm.reduce(tensor, root, op); });
  }
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum) {
    return on(list, [&](auto& comm) { return comm.reduce(list, root, op); });
  }
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    return on(tensor, [&](auto& comm) { return comm.broadcast(tensor, root); });
  }
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0) {
    return on(list, [&](auto& comm) { return comm.broadcast(list, root); });
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return on(input, [&](auto& comm) { return comm.reduce_scatter(output, input, op); });
  }
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    return on(inputs, [&](auto& comm) { return comm.reduce_scatter(outputs, inputs, op); });
  }
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return on(input, [&](auto& comm) { return comm.all_gather(output, input); });
  }
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return on(inputs, [&](auto& comm) { return comm.all_gather(outputs, inputs); });
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return on(input, [&](auto& comm) { return comm.all_to_all(output, input); });
  }
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return on(inputs, [&](auto& comm) { return comm.all_to_all(outputs, inputs); });
  }

  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    return host_.all_gather_bytes(bytes);
  }
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes) {
    return Work(host_.all_gather_bytes_async(all, std::move(bytes)));
  }
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    return host_.broadcast_bytes(bytes, root);
  }
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    return Work(host_.broadcast_bytes_async(bytes, root));
  }
  void barrier() { host_.barrier(); }
  Work barrier_async() { return Work(host_.barrier_async()); }

  /// Allocates from the communicator of `like`'s device, or from LibTorch if there is none.
  [[nodiscard]] at::Tensor empty_buffer(std::int64_t length,
                                        const at::Tensor& like) requires Buffered<Device> {
    Device* device = of(like);
    return device ? device->empty_buffer(length, like) : at::empty({length}, like.options());
  }
  void label(const std::shared_ptr<const std::string>& text) requires Labelled<Device> {
    for (Device& device : devices_) device.label(text);
    if constexpr (Labelled<Host>) host_.label(text);
  }

  /// Throws the error of a device's communicator if one has failed.
  void check_error() requires requires(Device& device) { device.check_error(); }
  {
    for (Device& device : devices_) device.check_error();
  }
  void abort(const std::string& reason) {
    for (Device& device : devices_) device.abort(reason);
    host_.abort(reason);
  }
  void shutdown() {
    for (Device& device : devices_) device.shutdown();
    host_.shutdown();
  }

  /// Returns the communicator of CPU tensors.
  [[nodiscard]] Host& host() { return host_; }
  /// Returns the communicators of the devices, in the order of construction.
  [[nodiscard]] std::vector<Device>& devices() { return devices_; }

 private:
  [[nodiscard]] Device* of(const at::Tensor& tensor) {
    const auto found = std::find_if(devices_.begin(), devices_.end(), [&](const Device& device) {
      return at::Device(device.tensor_device()) == tensor.device();
    });
    return found == devices_.end() ? nullptr : &*found;
  }

  template <class Call>
  Work on(const at::Tensor& tensor, Call&& call) {
    if (Device* device = of(tensor)) return Work(call(*device));
    return Work(call(host_));
  }
  template <class Call>
  Work on(const std::vector<at::Tensor>& list, Call&& call) {
    for (const at::Tensor& tensor : list)
      if (tensor.device() != list[0].device())
        throw UsageError(detail::formatted(
            "CommByDevice: a list has tensors on {} and on {}: make one call for each device",
            list[0].device().str(), tensor.device().str()));
    if (list.empty()) return Work(call(host_));
    return on(list[0], std::forward<Call>(call));
  }

  Host host_;
  std::vector<Device> devices_;
};

}  // namespace lockstep
