#pragma once

namespace lockstep {

/// A module that meets the other ranks in its forward in training: every rank must call it as often as the
/// others. A class derives from this beside torch::nn::Module.
class CollectiveModule {
 public:
  /// Of its group; 1 or less where there is nobody to meet.
  [[nodiscard]] virtual int ranks() const = 0;

 protected:
  CollectiveModule() = default;
  CollectiveModule(const CollectiveModule&) = default;
  CollectiveModule& operator=(const CollectiveModule&) = default;
  ~CollectiveModule() = default;
};

}  // namespace lockstep
