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
#include <any>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/detail/gloo_order.hpp"
#include "lockstep/comm/detail/host_work.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

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

/// A communicator of MPI that belongs to lockstep. The engine frees it after the destructor, unless operations are left on it.
struct MpiCommunicator {
  explicit MpiCommunicator(MPI_Comm own) : comm(own) { MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN); }
  ~MpiCommunicator();

  MPI_Comm comm;
  std::atomic<int> collectives{0};  ///< in flight
  std::atomic<bool> aborted{false};
  // Guarded by the engine's mutex:
  bool left = false;           ///< an operation was left on it
  std::function<bool()> over;  ///< see HostBackend::leave; null while the communicator is used
};

/// An operation of MpiBackend.
struct MpiOperation : HostOperation {
  std::shared_ptr<MpiCommunicator> communicator;
  std::vector<MPI_Request> requests;
  std::vector<int> expected;  ///< of a receive, the bytes of each request
};

/// MPI in this process: its initialization, its thread level, and the operations in flight of all communicators. See
/// MpiComm. With MPI_THREAD_SERIALIZED a mutex keeps lockstep's calls of MPI apart.
///
/// MPI is initialized here unless the program has done so. It is then finalized when the process exits with code 0, by the
/// thread that exits: under `launch` the thread that has initialized it has ended. After an abort, and with another code, it
/// is not: MPI_Finalize would wait for ranks that may be gone, and the launchers of MPI end a job if a rank exits without it.
///
/// Thread-safe.
class MpiEngine {
 public:
  using Clock = std::chrono::steady_clock;
  using Operation = std::shared_ptr<MpiOperation>;
  using Arithmetic = std::pair<MPI_Datatype, MPI_Op>;

  /// Returns the engine of this process. Throws UsageError if MPI is finalized, is another library than the one compiled
  /// for, was started by the launcher of another one, or provides less than MPI_THREAD_SERIALIZED.
  LOCKSTEP_PROCESS_WIDE static MpiEngine& get() {
    static MpiEngine* const engine = new MpiEngine();  // never destroyed: a communicator may be static
    if (!engine->refusal_.empty()) throw UsageError(engine->refusal_);
    if (engine->finalized_) throw UsageError(finalized_text);
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
      if (operation->communicator->aborted) return operation->end(aborted_error());
      try {
        start();
      } catch (...) {  // pieces of it may be in flight
        leave(*operation);
        throw;
      }
      if (!operation->is_message()) ++operation->communicator->collectives;
      pending_.push_back(operation);
      changed_.notify_one();
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
      if (now < begin + mpi_yield_time)
        sched_yield();
      else
        std::this_thread::sleep_for(std::min<Clock::duration>(mpi_pause, until - now));
    }
  }
  /// Does what can be done without waiting.
  void move_on() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock) step();
  }

  /// See HostOperation::at_end.
  void at_end(MpiOperation& operation, HostOperation::Function function) {
    const std::lock_guard lock(mutex_);
    operation.at_end(std::move(function));
  }

  /// Ends what is in flight on a communicator, and what is launched later. MPI cannot cancel operations: they are left, with
  /// their tensors.
  void abort(MpiCommunicator& communicator) {
    communicator.aborted = true;
    const std::lock_guard lock(mutex_);
    has_aborted_ = true;
    end_pending(&communicator, aborted_error());
  }
  void abort(const MpiOperation& operation) { abort(*operation.communicator); }
  /// Frees a communicator with the next use of MPI: the last operation on it may end with the mutex locked.
  void release(MPI_Comm comm) {
    const std::lock_guard lock(released_mutex_);
    released_.push_back(comm);
  }
  /// See HostBackend::leave. MPI_Finalize completes what is in flight then.
  bool leave(MpiCommunicator& communicator, std::function<bool()> over) {
    const std::lock_guard lock(mutex_);
    communicator.over = std::move(over);
    return has_thread();
  }

  /// Returns how MPI reduces a dtype, std::nullopt for an operation or a dtype that it does not. See reduction_of.
  [[nodiscard]] std::optional<Arithmetic> arithmetic(at::ScalarType type,
                                                     c10d::ReduceOp::RedOpType op) const {
    const std::pair<at::ScalarType, MPI_Datatype> types[] = {
        {at::kFloat, MPI_FLOAT},  {at::kDouble, MPI_DOUBLE}, {at::kChar, MPI_INT8_T},
        {at::kByte, MPI_UINT8_T}, {at::kBool, MPI_UINT8_T},  {at::kInt, MPI_INT32_T},
        {at::kLong, MPI_INT64_T}, {at::kHalf, two_bytes_},   {at::kBFloat16, two_bytes_}};
    const Ops& ops = type == at::kHalf ? half_ops_ : type == at::kBFloat16 ? bfloat16_ops_ : ops_;
    const auto reduction = reduction_of(type, op);
    for (const auto& [known, datatype] : types)
      if (known == type && reduction) return Arithmetic{datatype, ops[*reduction]};
    return std::nullopt;
  }

 private:
  static constexpr const char* finalized_text =
      "MPI is finalized, and cannot be initialized again in this process: make "
      "communicators, and shut them down, before MPI_Finalize";
  // A wait asks MPI `spins` times at once, then after yields for `mpi_yield_time`, then after pauses. The thread pauses
  // before it asks `questions` times: MPI moves a large tensor in many parts, one for each question.
  static constexpr int spins = 100, questions = 16;
  using Ops = std::array<MPI_Op, reductions>;

  MpiEngine() {
    char text[16384];  // the library loaded may be of another MPI, whose limit is larger
    int length = 0, flag = 0;
    MPI_Get_library_version(text, &length);
    check_mpi_library({text, static_cast<std::size_t>(length)});
    MPI_Finalized(&flag);
    if (flag) throw UsageError(finalized_text);
    MPI_Initialized(&flag);
    if (!flag) {
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level_));
      on_exit([](int code, void* engine) { static_cast<MpiEngine*>(engine)->finalize(code); }, this);
    }
    try {  // MPI_Finalize is called all the same
      begin_use();
    } catch (const std::exception& error) {
      refusal_ = error.what();
    }
  }
  void begin_use() {
    int size = 0, key = 0;
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
    make_ops<c10::Half>(half_ops_);
    make_ops<c10::BFloat16>(bfloat16_ops_);

    if (!has_thread()) return;
    sigset_t all, before;  // signals are for the program's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { progress(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  template <class T>
  static void make_ops(Ops& ops) {
    MPI_User_function* const functions[] = {combine_all<T, std::plus<>>, combine_all<T, std::multiplies<>>,
                                            combine_all<T, LeastElement>, combine_all<T, GreatestElement>};
    for (std::size_t i = 0; i < ops.size(); ++i) check_mpi(MPI_Op_create(functions[i], 1, &ops[i]));
  }
  template <class T, class Op>
  static void combine_all(void* in, void* in_out, int* count, MPI_Datatype*) {
    auto* const out = static_cast<char*>(in_out);
    combine<T, Op>(out, out, static_cast<const char*>(in), static_cast<std::size_t>(*count) * sizeof(T));
  }

  void progress() {
    std::unique_lock lock(mutex_);
    while (!stops_) {
      changed_.wait(lock, [&] { return stops_ || !pending_.empty(); });
      lock.unlock();
      std::this_thread::sleep_for(mpi_pause);
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
    std::unique_lock lock(mutex_);
    const auto completes = [](const Operation& operation) {
      const auto& over = operation->communicator->over;
      return over && !over();
    };
    for (step(); std::any_of(pending_.begin(), pending_.end(), completes); step()) {
      lock.unlock();
      std::this_thread::sleep_for(mpi_pause);
      lock.lock();
    }
    end_pending(nullptr, error_of(finalized_text));
    free_released();
    finalized_ = true;
    for (Ops* ops : {&half_ops_, &bfloat16_ops_})
      for (MPI_Op& op : *ops) MPI_Op_free(&op);
    MPI_Type_free(&two_bytes_);
  }

  // ---- With the mutex locked -----------------------------------------------------------------------------------------

  void free_released() {
    std::unique_lock lock(released_mutex_);
    auto released = std::exchange(released_, {});
    lock.unlock();
    for (MPI_Comm& comm : released) MPI_Comm_free(&comm);
  }
  void step() {
    if (occupied_ || finalized_) return;
    free_released();
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
      // Some requests of one that has failed may still be in flight.
      end(operation, failure_of(*operation, code), code != MPI_SUCCESS);
    }
  }
  // Returns why the operation has failed, null if it has not. `code` is the result of MPI_Testall.
  [[nodiscard]] std::exception_ptr failure_of(const MpiOperation& operation, int code) const {
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
    if (kind != MPI_ERR_TRUNCATE) return error_of(mpi_error_text(code));
    return error_of<OtherOperation>(operation.is_message()
                                        ? "the message has another size than the tensor that is to receive it"
                                        : "the ranks have launched different operations");
  }

  void end(const Operation& operation, const std::exception_ptr& error, bool leaves) {
    if (leaves) leave(*operation);
    if (!operation->is_message()) --operation->communicator->collectives;
    operation->end(error);
  }
  void leave(MpiOperation& operation) {
    left_.push_back(std::exchange(operation.tensors, {}));
    operation.communicator->left = true;
  }
  // Ends the operations of a communicator, or of all.
  void end_pending(const MpiCommunicator* of, const std::exception_ptr& error) {
    for (const Operation& operation : std::exchange(pending_, {}))
      if (of == nullptr || operation->communicator.get() == of)
        end(operation, error, true);
      else
        pending_.push_back(operation);
  }

  const pid_t owner_ = getpid();
  std::string refusal_;  // why MPI cannot be used, which get() throws
  int level_ = MPI_THREAD_SINGLE;
  MPI_Datatype two_bytes_ = MPI_DATATYPE_NULL;
  const Ops ops_{MPI_SUM, MPI_PROD, MPI_MIN, MPI_MAX};
  Ops half_ops_{}, bfloat16_ops_{};  // MPI has neither dtype
  std::atomic<int> waiting_{0};      // threads of this process
  std::atomic<bool> finalized_{false};

  std::mutex released_mutex_;
  std::vector<MPI_Comm> released_;  // whose last owner has gone

  std::mutex mutex_;  // of all below
  std::condition_variable changed_, free_;
  std::vector<Operation> pending_;
  std::vector<std::any> left_;  // tensors that MPI may still use
  std::vector<MPI_Status> statuses_;
  bool stops_ = false, has_aborted_ = false;
  bool occupied_ = false;  // a thread is in call_blocking
  std::thread thread_;
};

inline MpiCommunicator::~MpiCommunicator() {
  if (!left && !aborted) try {
      MpiEngine::get().release(comm);
    } catch (const std::exception&) {  // MPI is finalized
    }
}

/// A HostBackend over an MPI communicator, by its non-blocking calls. The order of sums is MPI's. An operation above
/// `piece_bytes` is several calls of MPI.
class MpiBackend final : public HostBackend {
 public:
  MpiBackend(std::shared_ptr<MpiCommunicator> communicator, int rank, int size,
             std::size_t piece_bytes = 1 << 30)
      : HostBackend(rank, size),
        engine_(MpiEngine::get()),
        communicator_(std::move(communicator)),
        piece_bytes_(piece_bytes) {}

  const std::string getBackendName() const override { return "mpi"; }
  void abort() override { engine_.abort(*communicator_); }
  bool drain(std::chrono::steady_clock::time_point until) override {
    return engine_.wait(until, [this] { return communicator_->collectives.load() == 0; });
  }
  bool leave(std::function<bool()> over) override { return engine_.leave(*communicator_, std::move(over)); }

 private:
  struct Piece {
    const char* in;
    char* out;
    int count, row_count;  // row_count, of row_type: the bytes of the piece in each row of a tensor
    MPI_Datatype row_type;
    MPI_Request* request;
  };

  // Calls MPI. Returns its result.
  [[nodiscard]] int start(const Call& call, const MpiEngine::Arithmetic& how, const Piece& piece) const {
    const auto [type, op] = how;
    const auto [in, out, count, row_count, row_type, request] = piece;
    const MPI_Comm comm = communicator_->comm;
    const bool receives = call.root == getRank();
    switch (call.kind) {
      case Kind::barrier:
        return MPI_Ibarrier(comm, request);
      case Kind::broadcast:
        return MPI_Ibcast(out, count, MPI_BYTE, call.root, comm, request);
      case Kind::all_reduce:
        return MPI_Iallreduce(MPI_IN_PLACE, out, count, type, op, comm, request);
      case Kind::reduce:
        return MPI_Ireduce(receives && in == out ? MPI_IN_PLACE : in, receives ? out : nullptr, count, type,
                           op, call.root, comm, request);
      case Kind::all_gather:
        return MPI_Iallgather(in, count, MPI_BYTE, out, row_count, row_type, comm, request);
      case Kind::all_to_all:
        return MPI_Ialltoall(in, row_count, row_type, out, row_count, row_type, comm, request);
      case Kind::send:
        return MPI_Isend(in, count, MPI_BYTE, call.root, call.tag, comm, request);
      case Kind::receive:
        return MPI_Irecv(out, count, MPI_BYTE, call.root, call.tag, comm, request);
    }
    return MPI_ERR_OTHER;
  }

  // Returns the datatype of the first `count` bytes of each row of `row` bytes.
  static MPI_Datatype part_of_rows(std::size_t row, int count) {
    MPI_Datatype bytes = MPI_DATATYPE_NULL, type = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(count, MPI_BYTE, &bytes));
    check_mpi(MPI_Type_create_resized(bytes, 0, static_cast<MPI_Aint>(row), &type));
    check_mpi(MPI_Type_commit(&type));
    MPI_Type_free(&bytes);
    return type;
  }

  WorkPtr launch(const Call& call) override {
    const bool reduces = call.op.has_value(), in_place = reduces || call.kind == Kind::broadcast;
    const auto how =
        reduces ? engine_.arithmetic(call.input.scalar_type(), *call.op) : MpiEngine::Arithmetic{};
    TORCH_CHECK(how, "MPI cannot reduce ", dtype_name(call.input.scalar_type()), " so");
    at::Tensor input = call.input;
    char* const to = call.to();  // first: it may copy a lazily cloned tensor
    const char* from = call.from();
    if (from != nullptr && to != nullptr && !(in_place && from == to) && from < to + call.output.nbytes() &&
        to < from + input.nbytes()) {
      input = input.detach().clone();  // MPI forbids that they overlap
      from = static_cast<const char*>(input.const_data_ptr());
    }
    auto operation = std::make_shared<MpiOperation>();
    operation->kind = call.kind;
    operation->communicator = communicator_;
    operation->tensors = std::pair(input, call.output);
    const bool of_rows = call.kind == Kind::all_gather || call.kind == Kind::all_to_all;
    const std::size_t element = reduces ? call.input.element_size() : 1, size = call.row / element;
    const std::size_t copies = of_rows ? static_cast<std::size_t>(getSize()) : 1;
    const std::size_t most = std::max<std::size_t>(1, piece_bytes_ / (element * copies));
    engine_.launch(operation, [&] {
      for (std::size_t begin = 0; begin == 0 || begin < size; begin += most) {
        const int count = static_cast<int>(std::min(most, size - begin));
        if (call.kind == Kind::receive) operation->expected.push_back(count);
        MPI_Request* const request = &operation->requests.emplace_back(MPI_REQUEST_NULL);
        const std::size_t offset = begin * element;
        const bool in_parts = copies > 1 && static_cast<std::size_t>(count) < size;
        MPI_Datatype type = in_parts ? part_of_rows(size, count) : MPI_BYTE;
        check_mpi(start(call, *how,
                        {from ? from + offset : from, to ? to + offset : to, count, in_parts ? 1 : count,
                         type, request}));
        if (in_parts) MPI_Type_free(&type);  // once the operation has completed
      }
    });
    return c10::make_intrusive<EngineWork<MpiEngine*>>(&engine_, std::move(operation));
  }

  MpiEngine& engine_;
  const std::shared_ptr<MpiCommunicator> communicator_;
  const std::size_t piece_bytes_;
};

}  // namespace lockstep::inline v0_1::detail
