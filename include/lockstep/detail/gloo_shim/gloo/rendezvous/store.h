#pragma once

#include <chrono>
#include <string>
#include <vector>

// The base of c10d's GlooStore, which ProcessGroupGloo.hpp defines inline. LibTorch has a vtable of its own
// for it; every function here is declared only, so that none is emitted by those who include it.
#define LOCKSTEP_DETAIL_GLOO_SHIM_STORE

namespace gloo::rendezvous {

class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace gloo::rendezvous
