#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {

/// A non-owning view of a communicator for function hooks. Forwards every call and adds the bytes that this
/// rank sends to a counter.
template <Communicator Comm>
class CountingComm {
 public:
  using Work = typename Comm::Work;

  CountingComm(Comm& comm, std::uint64_t& bytes) : comm_(&comm), bytes_(&bytes) {}

  [[nodiscard]] int rank() const { return comm_->rank(); }
  [[nodiscard]] int size() const { return comm_->size(); }
  [[nodiscard]] const World& world() const { return comm_->world(); }
  /// Returns the underlying communicator, whose calls are not counted.
  [[nodiscard]] Comm& uncounted() const { return *comm_; }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    return comm_->all_reduce(counted(tensor), op);
  }
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    return comm_->all_reduce(counted(list), op);
  }
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return comm_->reduce(counted(tensor), root, op);
  }
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum) {
    return comm_->reduce(counted(list), root, op);
  }
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    if (rank() == root) counted(tensor);
    return comm_->broadcast(tensor, root);
  }
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0) {
    if (rank() == root) counted(list);
    return comm_->broadcast(list, root);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return comm_->reduce_scatter(output, counted(input), op);
  }
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    return comm_->reduce_scatter(outputs, counted(inputs), op);
  }
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return comm_->all_gather(output, counted(input));
  }
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return comm_->all_gather(outputs, counted(inputs));
  }
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return comm_->all_to_all(output, counted(input));
  }
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return comm_->all_to_all(outputs, counted(inputs));
  }
  Work send(const at::Tensor& tensor, int peer, int tag = 0) {
    return comm_->send(counted(tensor), peer, tag);
  }
  Work send(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    return comm_->send(counted(list), peer, tag);
  }
  Work recv(const at::Tensor& tensor, int peer, int tag = 0) { return comm_->recv(tensor, peer, tag); }
  Work recv(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    return comm_->recv(list, peer, tag);
  }

  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    return comm_->all_gather_bytes(counted(bytes));
  }
  Work all_gather_bytes_async(std::vector<std::string>& all, const std::string& bytes) {
    return comm_->all_gather_bytes_async(all, counted(bytes));
  }
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    if (rank() == root) counted(bytes);
    return comm_->broadcast_bytes(bytes, root);
  }
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    if (rank() == root) counted(bytes);
    return comm_->broadcast_bytes_async(bytes, root);
  }
  void barrier() { comm_->barrier(); }
  Work barrier_async() { return comm_->barrier_async(); }
  void abort(const std::string& reason) { comm_->abort(reason); }
  void shutdown() { comm_->shutdown(); }

 private:
  const at::Tensor& counted(const at::Tensor& tensor) {
    *bytes_ += sent_bytes(*comm_, tensor);
    return tensor;
  }
  const std::vector<at::Tensor>& counted(const std::vector<at::Tensor>& list) {
    for (const at::Tensor& tensor : list) counted(tensor);
    return list;
  }
  const std::string& counted(const std::string& bytes) {
    if (size() > 1) *bytes_ += bytes.size();
    return bytes;
  }

  Comm* comm_;
  std::uint64_t* bytes_;
};

}  // namespace lockstep::detail
