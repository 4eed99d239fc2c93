// All that a shared object of the tests exports by itself.
#include "comm/shared_object.hpp"

extern "C" [[gnu::visibility("default")]] const SharedObject* LOCKSTEP_TEST_EXPORT() {
  return &functions_of_this_object();
}
