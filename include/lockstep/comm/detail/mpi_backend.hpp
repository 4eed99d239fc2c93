#pragma once

#if !__has_include(<mpi.h>)
#error "lockstep: MpiComm needs the headers of an MPI library: link lockstep::mpi, or leave this header out"
#endif

// MPI's former bindings of C++ would need another library.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/gloo_order.hpp"
#include "lockstep/comm/detail/host_work.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

inline std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return formatted("MPI error {}", code);
  return {text, static_cast<std::size_t>(length)};
}
/// Throws CommunicationError with MPI's text unless `code`, a result of MPI, is MPI_SUCCESS.
inline void check_mpi(int code) {
  if (code != MPI_SUCCESS) throw CommunicationError(formatted("MPI failed: {}", mpi_error_text(code)));
}

#ifdef OPEN_MPI
inline constexpr bool compiled_for_open_mpi = true;
#else
inline constexpr bool compiled_for_open_mpi = false;
#endif

/// Throws UsageError if `library`, the text of MPI_Get_library_version, is of another implementation than the headers.
inline void check_mpi_library(std::string_view library, bool open_mpi = compiled_for_open_mpi) {
  for (const std::string_view name : {"Open MPI", "MPICH", "Intel(R) MPI", "MVAPICH"})
    if ((name == "Open MPI") != open_mpi && library.find(name) != std::string_view::npos)
      throw UsageError(formatted(
          "the program was compiled with the headers of {}, and has loaded the library of another MPI, '{}': "
          "compile it with the headers of that one, or correct LD_LIBRARY_PATH and LD_PRELOAD",
          open_mpi ? "Open MPI" : "MPICH", library.substr(0, library.find_first_of("\n,"))));
}

/// Throws UsageError if MPI_COMM_WORLD has one rank, `size`, although a launcher has started several processes.
inline void check_mpi_launcher(int size, const Variables& variables = process_variable) {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const auto started = variables(variable); size == 1 && started && *started != "1")
      throw UsageError(formatted(
          "{} processes were started ({}={}), and each is rank 0 of 1 in MPI: the launcher is of another MPI "
          "library than the program, which was compiled for {}. Start it by that library's mpirun or mpiexec",
          *started, variable, *started, compiled_for_open_mpi ? "Open MPI" : "MPICH"));
}

/// A communicator of MPI that belongs to lockstep. The destructor frees it, unless operations are left on it.
struct MpiCommunicator {
  explicit MpiCommunicator(MPI_Comm own) : comm(own) { MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN); }
  ~MpiCommunicator();

  MPI_Comm comm;
  std::atomic<int> collectives{0};  ///< in flight
  std::atomic<bool> aborted{false};
  bool left = false;  ///< an operation was left on it; guarded by the engine's mutex
};

/// An operation of MpiBackend. It owns its tensors.
class MpiWork final : public HostWork {
 public:
  bool wait_until(std::chrono::steady_clock::time_point until) override;
  void at_end(std::function<void(bool failed)> function) override;
  bool isCompleted() override;
  bool isSuccess() const override { return ended() && !error; }
  std::exception_ptr exception() const override { return ended() ? error : nullptr; }
  void abort() override;
  [[nodiscard]] bool ended() const { return has_ended.load(std::memory_order_acquire); }

  // Of the engine.
  std::shared_ptr<MpiCommunicator> communicator = {};
  bool is_message = false;
  at::Tensor input = {}, output = {};
  std::vector<MPI_Request> requests = {};
  std::vector<int> expected = {};  // of a receive, the bytes of each request
  std::vector<std::function<void(bool failed)>> functions = {};
  std::exception_ptr error = {};  // valid once the operation has ended
  std::atomic<bool> has_ended{false};
};

/// MPI in this process: its initialization, its thread level, and the operations in flight of all communicators.
///
/// With MPI_THREAD_MULTIPLE a thread moves the operations on, so that they overlap with computation. With
/// MPI_THREAD_SERIALIZED launches and waits do, and a mutex keeps lockstep's calls of MPI apart.
///
/// MPI is initialized here unless the program has done so. It is then finalized when the process exits with code 0, by the
/// thread that exits: under `launch` the thread that has initialized it has ended. After an abort, and with another code, it
/// is not: MPI_Finalize would wait for ranks that may be gone, and the launchers of MPI end a job if a rank exits without it.
///
/// Thread-safe.
class MpiEngine {
 public:
  using Clock = std::chrono::steady_clock;
  using Operation = c10::intrusive_ptr<MpiWork>;
  struct Reduction {
    MPI_Datatype type;
    MPI_Op op;
  };

  /// Returns the engine of this process. Throws UsageError if MPI is finalized, is another library than the one compiled
  /// for, was started by the launcher of another one, or provides less than MPI_THREAD_SERIALIZED.
  static MpiEngine& get() {
    MpiEngine& engine = of_process();
    if (engine.finalized_) throw UsageError(finalized_text);
    return engine;
  }
  /// The same, also after MPI is finalized.
  LOCKSTEP_PROCESS_WIDE static MpiEngine& of_process() {
    static MpiEngine* const engine = new MpiEngine();  // never destroyed: a communicator may be static
    return *engine;
  }
  /// Returns whether a thread moves the operations on.
  [[nodiscard]] bool has_thread() const { return level_ == MPI_THREAD_MULTIPLE; }

  /// Calls `function()`, which calls MPI and does not block. Throws UsageError if MPI is finalized.
  template <class Function>
  void call(const Function& function) {
    std::unique_lock lock(mutex_);
    free_.wait(lock, [&] { return !occupied_; });
    if (finalized_) throw UsageError(finalized_text);
    function();
  }
  /// Calls `function()`, which may block in MPI. With MPI_THREAD_SERIALIZED no other thread of lockstep calls MPI meanwhile.
  template <class Function>
  void call_blocking(const Function& function) {
    if (has_thread()) return function();
    call([&] { occupied_ = true; });
    const auto release = c10::make_scope_exit([this] {
      const std::lock_guard lock(mutex_);
      occupied_ = false;
      free_.notify_all();
    });
    function();
  }

  /// Launches the operation: `start()` calls MPI and fills `requests`. Throws what it throws.
  template <class Start>
  void launch(const Operation& operation, const Start& start) {
    call([&] {
      if (operation->communicator->aborted) return end(*operation, "the operation was aborted");
      try {
        start();
      } catch (...) {  // pieces of it may be in flight
        leave(operation);
        throw;
      }
      if (!operation->is_message) ++operation->communicator->collectives;
      pending_.push_back(operation);
      if (idle_) changed_.notify_one();
    });
  }

  /// Blocks until `done()`, at most until `until`, and moves all operations on. Returns whether it is done.
  template <class Done>
  bool wait(Clock::time_point until, const Done& done) {
    ++waiting_;
    const auto end_of_wait = c10::make_scope_exit([this] { --waiting_; });
    const auto begin = Clock::now();
    for (int round = 0;; ++round) {
      move_on();
      if (done()) return true;
      if (round < spins) continue;
      const auto now = Clock::now();
      if (now >= until) return false;
      if (now < begin + busy_time)
        sched_yield();
      else
        std::this_thread::sleep_for(std::min<Clock::duration>(pause, until - now));
    }
  }
  /// Does what can be done without waiting.
  void move_on() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) step();
  }

  /// Calls `function(failed)` when the operation ends, at once if it has. It must not launch or wait.
  void at_end(MpiWork& operation, std::function<void(bool failed)> function) {
    const std::lock_guard lock(mutex_);
    if (operation.ended()) return function(operation.error != nullptr);
    operation.functions.push_back(std::move(function));
  }

  /// Ends what is in flight on a communicator that is not used any more, and if it `aborts` also what is launched later.
  /// MPI cannot cancel operations: they are left, with their tensors.
  void end_all(MpiCommunicator& communicator, bool aborts) {
    if (aborts) communicator.aborted = true;
    const std::lock_guard lock(mutex_);
    has_aborted_ = has_aborted_ || aborts;
    end_pending(&communicator, "the operation was aborted");
  }

  /// Returns how MPI reduces a dtype, std::nullopt for an operation or a dtype that it does not. See computed_op.
  [[nodiscard]] std::optional<Reduction> reduction(at::ScalarType type, c10d::ReduceOp::RedOpType op) const {
    using Op = c10d::ReduceOp;
    const std::pair<at::ScalarType, MPI_Datatype> types[] = {
        {at::kFloat, MPI_FLOAT},  {at::kDouble, MPI_DOUBLE}, {at::kChar, MPI_INT8_T},
        {at::kByte, MPI_UINT8_T}, {at::kBool, MPI_UINT8_T},  {at::kInt, MPI_INT32_T},
        {at::kLong, MPI_INT64_T}, {at::kHalf, two_bytes_},   {at::kBFloat16, two_bytes_}};
    const auto* const found =
        std::find_if(std::begin(types), std::end(types), [&](auto& t) { return t.first == type; });
    const auto computed = computed_op(type, op);
    if (found == std::end(types) || !computed) return std::nullopt;
    const Op::RedOpType known[] = {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX};
    const auto i = static_cast<std::size_t>(std::find(std::begin(known), std::end(known), *computed) -
                                            std::begin(known));
    if (i == std::size(known)) return std::nullopt;
    const MPI_Op ops[] = {MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX};
    return Reduction{found->second,
                     found->second != two_bytes_ ? ops[i] : own_ops_[type == at::kHalf ? i : 4 + i]};
  }

 private:
  static constexpr const char* finalized_text =
      "MPI is finalized, and cannot be initialized again in this process: make "
      "communicators, and shut them down, before MPI_Finalize";
  // A wait asks MPI `spins` times at once, then after yields for `busy_time`, then after pauses. The thread pauses before it
  // asks `questions` times: MPI moves a large tensor in many parts, one for each question.
  static constexpr int spins = 100, questions = 16;
  static constexpr std::chrono::milliseconds busy_time{20};
  static constexpr std::chrono::microseconds pause{50};

  MpiEngine() {
    char text[16384];  // the library loaded may be of another MPI, whose limit is larger
    int length = 0, flag = 0, size = 0, key = 0;
    MPI_Get_library_version(text, &length);
    check_mpi_library({text, static_cast<std::size_t>(length)});
    MPI_Finalized(&flag);
    if (flag) throw UsageError(finalized_text);
    MPI_Initialized(&flag);
    if (!flag) {
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level_));
      on_exit([](int code, void* engine) { static_cast<MpiEngine*>(engine)->finalize(code); }, this);
    }
    MPI_Query_thread(&level_);
    if (level_ < MPI_THREAD_SERIALIZED)
      throw UsageError(formatted(
          "MPI provides MPI_THREAD_{}, and MpiComm needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE: pass "
          "MPI_THREAD_MULTIPLE to MPI_Init_thread, and use an MPI library that provides it",
          level_ == MPI_THREAD_SINGLE ? "SINGLE" : "FUNNELED"));
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    check_mpi_launcher(size);

    // MPI_Finalize, also the program's, first deletes the attributes of MPI_COMM_SELF.
    const auto at_finalize = [](MPI_Comm, int, void* engine, void*) {
      static_cast<MpiEngine*>(engine)->end_use();
      return MPI_SUCCESS;
    };
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_finalize, &key, nullptr));
    check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, this));
    check_mpi(MPI_Type_contiguous(2, MPI_BYTE, &two_bytes_));
    check_mpi(MPI_Type_commit(&two_bytes_));
    make_ops<c10::Half>(0);
    make_ops<c10::BFloat16>(4);

    if (!has_thread()) return;
    sigset_t all, before;  // signals are for the program's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { progress(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  template <class T>
  void make_ops(std::size_t first) {
    MPI_User_function* const functions[] = {combine_all<T, AddElements>, combine_all<T, MultiplyElements>,
                                            combine_all<T, LeastElement>, combine_all<T, GreatestElement>};
    for (std::size_t i = 0; i < 4; ++i) check_mpi(MPI_Op_create(functions[i], 1, &own_ops_[first + i]));
  }
  template <class T, class Op>
  static void combine_all(void* in, void* in_out, int* count, MPI_Datatype*) {
    auto* const out = static_cast<char*>(in_out);
    combine<T, Op>(out, out, static_cast<const char*>(in), static_cast<std::size_t>(*count) * sizeof(T));
  }

  void progress() {
    std::unique_lock lock(mutex_);
    while (!stops_) {
      idle_ = pending_.empty();
      changed_.wait(lock, [&] { return stops_ || !pending_.empty(); });
      idle_ = false;
      lock.unlock();
      std::this_thread::sleep_for(pause);
      lock.lock();
      for (int i = 0; i < questions && waiting_ == 0 && !pending_.empty(); ++i) step();
    }
  }

  // MPI is initialized here, and the process exits.
  void finalize(int code) {
    if (getpid() != owner_) return;  // a forked child
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
      if (code != 0 || has_aborted_ || finalized_) return;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    MPI_Finalize();
  }
  // MPI_Finalize has been called.
  void end_use() {
    const std::lock_guard lock(mutex_);
    finalized_ = true;
    end_pending(nullptr, finalized_text);
    for (MPI_Op& op : own_ops_) MPI_Op_free(&op);
    MPI_Type_free(&two_bytes_);
  }

  // ---- With the mutex locked -----------------------------------------------------------------------------------------

  void step() {
    if (occupied_ || finalized_) return;
    for (std::size_t i = 0; i < pending_.size();) {
      const Operation operation = pending_[i];
      auto& requests = operation->requests;
      statuses_.resize(std::max(statuses_.size(), requests.size()));
      int done = 0;
      const int code =
          MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses_.data());
      if (code == MPI_SUCCESS && done == 0) {
        ++i;
        continue;
      }
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      if (!operation->is_message) --operation->communicator->collectives;
      if (code != MPI_SUCCESS) leave(operation);  // some of its requests may still be in flight
      end_with(*operation, failure_of(*operation, code));
    }
  }
  // Returns why the operation has failed, null if it has not. `code` is the result of MPI_Testall.
  [[nodiscard]] std::exception_ptr failure_of(const MpiWork& operation, int code) const {
    for (std::size_t i = 0; code == MPI_ERR_IN_STATUS && i < operation.requests.size(); ++i)
      if (const int own = statuses_[i].MPI_ERROR; own != MPI_SUCCESS && own != MPI_ERR_PENDING) code = own;
    int kind = MPI_SUCCESS;
    if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
    for (std::size_t i = 0; kind == MPI_SUCCESS && i < operation.expected.size(); ++i) {
      int received = 0;
      MPI_Get_count(&statuses_[i], MPI_BYTE, &received);
      if (received != operation.expected[i]) kind = MPI_ERR_TRUNCATE;
    }
    if (kind == MPI_SUCCESS) return nullptr;
    if (kind != MPI_ERR_TRUNCATE) return std::make_exception_ptr(std::runtime_error(mpi_error_text(code)));
    return std::make_exception_ptr(OtherOperation(
        operation.is_message ? "the message has another size than the tensor that is to receive it"
                             : "the ranks have launched different operations"));
  }

  static void end(MpiWork& operation, const char* error) {
    end_with(operation, std::make_exception_ptr(std::runtime_error(error)));
  }
  static void end_with(MpiWork& operation, std::exception_ptr error) {
    for (const auto& function : std::exchange(operation.functions, {})) function(error != nullptr);
    operation.error = std::move(error);
    operation.has_ended.store(true, std::memory_order_release);
  }
  void leave(const Operation& operation) {
    left_.push_back(operation);
    operation->communicator->left = true;
  }
  // Ends the operations of a communicator, or of all.
  void end_pending(const MpiCommunicator* of, const char* error) {
    for (const Operation& operation : std::exchange(pending_, {})) {
      if (of != nullptr && operation->communicator.get() != of) {
        pending_.push_back(operation);
        continue;
      }
      leave(operation);
      if (!operation->is_message) --operation->communicator->collectives;
      end(*operation, error);
    }
  }

  const pid_t owner_ = getpid();
  int level_ = MPI_THREAD_SINGLE;
  MPI_Datatype two_bytes_ = MPI_DATATYPE_NULL;
  std::array<MPI_Op, 8> own_ops_{};  // sum, product, min and max of fp16, then of bf16
  std::atomic<int> waiting_{0};      // threads of this process
  std::atomic<bool> finalized_{false};

  std::mutex mutex_;  // of all below
  std::condition_variable changed_, free_;
  std::vector<Operation> pending_, left_;  // left_: MPI may still use their tensors
  std::vector<MPI_Status> statuses_;
  bool idle_ = false, stops_ = false, has_aborted_ = false;
  bool occupied_ = false;  // a thread is in call_blocking
  std::thread thread_;
};

inline MpiCommunicator::~MpiCommunicator() {
  if (!left && !aborted) try {
      MpiEngine::get().call_blocking([this] { MPI_Comm_free(&comm); });
    } catch (const std::exception&) {  // MPI is finalized
    }
}

inline bool MpiWork::wait_until(std::chrono::steady_clock::time_point until) {
  return MpiEngine::of_process().wait(until, [this] { return ended(); });
}
inline void MpiWork::at_end(std::function<void(bool failed)> function) {
  MpiEngine::of_process().at_end(*this, std::move(function));
}
inline bool MpiWork::isCompleted() {
  if (!ended()) MpiEngine::of_process().move_on();
  return ended();
}
inline void MpiWork::abort() {
  MpiEngine::of_process().end_all(*communicator, true);
}

/// A c10d::Backend over an MPI communicator, by its non-blocking calls. Tensors are dense and on the CPU. The order of sums
/// is MPI's. All-to-alls in uneven parts are refused. An operation above `piece_bytes` is several calls of MPI.
class MpiBackend final : public HostBackend {
 public:
  MpiBackend(std::shared_ptr<MpiCommunicator> communicator, int rank, int size,
             std::size_t piece_bytes = 1 << 30)
      : HostBackend(rank, size),
        engine_(MpiEngine::get()),
        communicator_(std::move(communicator)),
        comm_(communicator_->comm),
        piece_bytes_(piece_bytes) {}
  ~MpiBackend() override { engine_.end_all(*communicator_, false); }

  const std::string getBackendName() const override { return "mpi"; }
  void abort() override { engine_.end_all(*communicator_, true); }
  void drain(std::chrono::steady_clock::time_point until) override {
    engine_.wait(until, [this] { return communicator_->collectives.load() == 0; });
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return launch({}, {}, {}, [&](const Piece& p) { return MPI_Ibarrier(comm_, p.request); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch({}, one(tensors), {one(tensors).nbytes()}, [&](const Piece& p) {
      return MPI_Ibcast(p.out, p.count, MPI_BYTE, root_of(options), comm_, p.request);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto how = reduction(one(tensors), options.reduceOp);
    const auto start = [&](const Piece& p) {
      return MPI_Iallreduce(MPI_IN_PLACE, p.out, p.count, how.type, how.op, comm_, p.request);
    };
    return averaged(options.reduceOp, tensors[0], launch({}, tensors[0], elements(tensors[0]), start));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto how = reduction(one(tensors), options.reduceOp);
    const int root = root_of(options);
    const bool receives = root == getRank();
    const WorkPtr work = launch({}, tensors[0], elements(tensors[0]), [&](const Piece& p) {
      return MPI_Ireduce(receives ? MPI_IN_PLACE : p.out, receives ? p.out : nullptr, p.count, how.type,
                         how.op, root, comm_, p.request);
    });
    return receives ? averaged(options.reduceOp, tensors[0], work) : work;
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_rows(output, input);
    return launch(input, output, rows_of(input.nbytes()), [&](const Piece& p) {
      return MPI_Iallgather(p.in, p.count, MPI_BYTE, p.out, p.row_count, p.row_type, comm_, p.request);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const int root = root_of(options);
    const auto start = [&](const at::Tensor& output) {
      return launch(one(inputs), output, rows_of(inputs[0].nbytes()), [&](const Piece& p) {
        return MPI_Igather(p.in, p.count, MPI_BYTE, p.out, p.row_count, p.row_type, root, comm_, p.request);
      });
    };
    return root == getRank() ? into_list(outputs.at(0), one(inputs), start) : start({});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const int root = root_of(options);
    const at::Tensor input = root == getRank() ? joined_rows(inputs.at(0), one(outputs)) : at::Tensor();
    return launch(input, one(outputs), rows_of(outputs[0].nbytes()), [&](const Piece& p) {
      return MPI_Iscatter(p.in, p.row_count, p.row_type, p.out, p.count, MPI_BYTE, root, comm_, p.request);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_rows(input, output);
    const auto how = reduction(output, options.reduceOp);
    WorkPtr own;
    for (int root = 0; root < getSize(); ++root) {  // a reduction to each rank
      const bool receives = root == getRank();
      const at::Tensor row = input.view({getSize(), -1})[root];
      const auto start = [&](const Piece& p) {
        return MPI_Ireduce(p.in, p.out, p.count, how.type, how.op, root, comm_, p.request);
      };
      const WorkPtr work = launch(row, receives ? output : at::Tensor(), elements(row), start);
      if (receives) own = work;
    }
    return averaged(options.reduceOp, output, own);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    check_even(output, output_sizes, input, input_sizes);
    const Pieces pieces = rows_of(input.nbytes() / static_cast<std::size_t>(getSize()));
    return launch(input, output, pieces, [&](const Piece& p) {
      return MPI_Ialltoall(p.in, p.row_count, p.row_type, p.out, p.row_count, p.row_type, comm_, p.request);
    });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return launch(one(tensors), {}, {tensors[0].nbytes(), 1, 1, true}, [&](const Piece& p) {
      return MPI_Isend(p.in, p.count, MPI_BYTE, peer, tag, comm_, p.request);
    });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return launch({}, one(tensors), {tensors[0].nbytes(), 1, 1, true}, [&](const Piece& p) {
      return MPI_Irecv(p.out, p.count, MPI_BYTE, peer, tag, comm_, p.request);
    });
  }

 private:
  /// How an operation is cut into pieces: `size` elements of `element` bytes, of which MPI moves `copies`
  /// in one call.
  struct Pieces {
    std::size_t size = 0, element = 1, copies = 1;
    bool is_message = false;
  };
  struct Piece {
    char *in, *out;
    int count, row_count;  // row_count, of row_type: the bytes of the piece in each row of a tensor
    MPI_Datatype row_type;
    MPI_Request* request;
  };

  // Returns the datatype of the first `count` bytes of each row of `row` bytes.
  static MPI_Datatype part_of_rows(std::size_t row, int count) {
    MPI_Datatype bytes = MPI_DATATYPE_NULL, type = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(count, MPI_BYTE, &bytes));
    check_mpi(MPI_Type_create_resized(bytes, 0, static_cast<MPI_Aint>(row), &type));
    check_mpi(MPI_Type_commit(&type));
    MPI_Type_free(&bytes);
    return type;
  }
  template <class Options>
  static int root_of(const Options& options) {
    return static_cast<int>(options.rootRank);
  }
  static Pieces elements(const at::Tensor& tensor) {
    return {static_cast<std::size_t>(tensor.numel()), static_cast<std::size_t>(tensor.element_size())};
  }
  [[nodiscard]] Pieces rows_of(std::size_t row) const {
    return {row, 1, static_cast<std::size_t>(getSize())};
  }
  [[nodiscard]] MpiEngine::Reduction reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    const auto found = engine_.reduction(tensor.scalar_type(), op);
    TORCH_CHECK(found, "MPI cannot reduce ", dtype_name(tensor.scalar_type()), " so");
    return *found;
  }

  // Launches an operation by `start(piece)` for each piece, which returns the result of MPI.
  template <class Start>
  WorkPtr launch(at::Tensor input, const at::Tensor& output, const Pieces& pieces, const Start& start) {
    for (const at::Tensor& tensor : {input, output})
      TORCH_CHECK(!tensor.defined() || (tensor.is_cpu() && tensor.is_contiguous()),
                  "MPI moves dense and contiguous tensors on the CPU");
    char *from = data_of(input), *const to = data_of(output);
    if (from != nullptr && to != nullptr && from < to + output.nbytes() && to < from + input.nbytes()) {
      input = input.detach().clone();  // MPI forbids that they overlap
      from = data_of(input);
    }
    auto operation = c10::make_intrusive<MpiWork>();
    operation->communicator = communicator_;
    operation->is_message = pieces.is_message;
    operation->input = input;
    operation->output = output;
    const std::size_t most = std::max<std::size_t>(1, piece_bytes_ / (pieces.element * pieces.copies));
    engine_.launch(operation, [&] {
      for (std::size_t begin = 0; begin == 0 || begin < pieces.size; begin += most) {
        const int count = static_cast<int>(std::min(most, pieces.size - begin));
        if (pieces.is_message && to != nullptr) operation->expected.push_back(count);
        MPI_Request* const request = &operation->requests.emplace_back(MPI_REQUEST_NULL);
        const std::size_t offset = begin * pieces.element;
        const bool in_parts = pieces.copies > 1 && static_cast<std::size_t>(count) < pieces.size;
        MPI_Datatype type = in_parts ? part_of_rows(pieces.size, count) : MPI_BYTE;
        char *const in = from ? from + offset : from, *const out = to ? to + offset : to;
        check_mpi(start(Piece{in, out, count, in_parts ? 1 : count, type, request}));
        if (in_parts) MPI_Type_free(&type);  // once the operation has completed
      }
    });
    return operation;
  }

  MpiEngine& engine_;
  const std::shared_ptr<MpiCommunicator> communicator_;
  const MPI_Comm comm_;
  const std::size_t piece_bytes_;
};

}  // namespace lockstep::detail
