// All-reduces of many sizes on MPI alone: the peer of bench_collectives.
//   mpirun -n N bench_mpi_all_reduce SMALLEST LARGEST
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sizes.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::size_t smallest = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 4,
                    largest = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : std::size_t{64} << 20;
  for (std::size_t bytes = smallest; bytes <= largest; bytes = size_after(bytes)) {
    std::vector<float> data(bytes / 4);
    const int calls =
        static_cast<int>(std::clamp<std::size_t>((std::size_t{64} << 20) / (bytes + 65536), 3, 500));
    std::vector<double> seconds;
    for (int batch = 0; batch < 10; ++batch) {
      const double begin = MPI_Wtime();
      for (int i = 0; i < calls; ++i)
        MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM,
                      MPI_COMM_WORLD);
      if (batch > 0) seconds.push_back((MPI_Wtime() - begin) / calls);
    }
    std::sort(seconds.begin(), seconds.end());
    if (rank == 0)
      std::printf("BENCH {\"system\": \"mpi\", \"bytes\": %zu, \"seconds\": %.9f}\n", bytes,
                  seconds[seconds.size() / 2]);
  }
  MPI_Finalize();
}
