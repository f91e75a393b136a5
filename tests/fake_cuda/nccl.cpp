// NCCL between processes of one machine, over shared memory. A collective blocks the host until all ranks have called
// it, and one inside ncclGroupStart and ncclGroupEnd too; sends are buffered, and those of a group make progress together.
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <set>
#include <vector>

namespace {
// as in nccl.h
enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum Op { SUM, PROD, MAX, MIN, AVG, FIRST_SCALED };
constexpr int SUCCESS = 0, VERSION = 22800;
constexpr size_t SLOT = 32 << 20, RING = 16 << 20;  // bytes of a rank's part of a collective, and on the way between two
constexpr size_t LARGE = 1 << 20;                    // as in runtime.cpp

struct Ring { std::atomic<size_t> written, read; char pad[48]; char data[RING]; };
struct Head { std::atomic<int> num_waiting, generation, num_joined; char pad[52]; };
struct UniqueId { char bytes[128]; };

void pause_briefly(int& times) {
  if (++times < 200) return (void)sched_yield();
  timespec time{0, 200000};
  nanosleep(&time, nullptr);
}

struct Comm {
  uint64_t id;
  int size, rank, num_splits = 0;
  Head* head;
  char* slots;  // one per rank
  Ring* rings;  // [from, to]

  Comm(uint64_t id, int size, int rank) : id(id), size(size), rank(rank) {
    char name[64];
    snprintf(name, sizeof name, "/nanotrain-fake-nccl-%016lx", id);
    size_t bytes = 4096 + size * SLOT + (size_t)size * size * sizeof(Ring);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, bytes)) perror(name), abort();
    head = (Head*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (head == MAP_FAILED) perror(name), abort();
    close(file);
    slots = (char*)head + 4096;
    rings = (Ring*)(slots + size * SLOT);
    head->num_joined++;
    for (int times = 0; head->num_joined < size;) pause_briefly(times);
    if (rank == 0) shm_unlink(name);
  }
  void barrier() {
    int generation = head->generation;
    if (++head->num_waiting == size) {
      head->num_waiting = 0;
      head->generation++;
    } else {
      for (int times = 0; head->generation == generation;) pause_briefly(times);
    }
  }
  const char* slot(int of) const { return slots + of * SLOT; }
  // Call `read(begin, bytes)` while the slots hold these bytes of every rank's `input` (null: nothing of this rank's).
  // Where kernels do nothing, large tensors hold no values to send: the ranks only meet.
  template <class Read>
  int exchange(const void* input, size_t bytes, Read read) {
    static const bool has_values = getenv("FAKE_CUDA_VALUES") != nullptr;
    if (!has_values && bytes >= LARGE) return barrier(), SUCCESS;
    for (size_t begin = 0; begin == 0 || begin < bytes; begin += SLOT) {
      size_t count = std::min(SLOT, bytes - begin);
      if (input) memcpy(slots + rank * SLOT, (const char*)input + begin, count);
      barrier();
      read(begin, count);
      barrier();
    }
    return SUCCESS;
  }
};

size_t width(int type) {
  switch (type) {
    case INT8: case UINT8: case FLOAT8_E4M3: case FLOAT8_E5M2: return 1;
    case FLOAT16: case BFLOAT16: return 2;
    case INT64: case UINT64: case FLOAT64: return 8;
    default: return 4;
  }
}

// Numbers of two bytes and their fp32 values.
struct BFloat16 {
  uint16_t bits;
  operator float() const { uint32_t wide = (uint32_t)bits << 16; float x; memcpy(&x, &wide, 4); return x; }
  BFloat16& operator=(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (x == x) wide += 0x7fff + (wide >> 16 & 1);  // to nearest, ties to even
    bits = wide >> 16;
    return *this;
  }
};

std::map<int, double> scales;  // of operations made by ncclRedOpCreatePreMulSum

template <class Number, class Sum>
void reduce_as(const Comm& comm, size_t offset, char* output, size_t count, int op) {
  for (size_t i = 0; i < count; i++) {
    auto value = [&](int rank) -> Sum { return ((const Number*)(comm.slot(rank) + offset))[i]; };
    Sum sum = value(0);
    for (int rank = 1; rank < comm.size; rank++) {
      Sum x = value(rank);
      if (op == MAX || op == MIN) sum = x != x || (op == MAX ? x > sum : x < sum) ? x : sum;
      else sum = op == PROD ? sum * x : sum + x;
    }
    if (op == AVG) sum /= comm.size;
    if (op >= FIRST_SCALED) sum *= scales[op];
    ((Number*)output)[i] = sum;
  }
}

void reduce(const Comm& comm, size_t offset, char* output, size_t count, int type, int op) {
  switch (type) {
    case INT8: return reduce_as<int8_t, int64_t>(comm, offset, output, count, op);
    case UINT8: return reduce_as<uint8_t, int64_t>(comm, offset, output, count, op);
    case INT32: return reduce_as<int32_t, int64_t>(comm, offset, output, count, op);
    case UINT32: return reduce_as<uint32_t, int64_t>(comm, offset, output, count, op);
    case INT64: case UINT64: return reduce_as<int64_t, int64_t>(comm, offset, output, count, op);
    case FLOAT16: return reduce_as<_Float16, float>(comm, offset, output, count, op);
    case BFLOAT16: return reduce_as<BFloat16, float>(comm, offset, output, count, op);
    case FLOAT32: return reduce_as<float, float>(comm, offset, output, count, op);
    case FLOAT64: return reduce_as<double, double>(comm, offset, output, count, op);
    default: fprintf(stderr, "fake NCCL: no reduction of type %d\n", type), abort();
  }
}

struct Transfer { Comm* comm; char* data; size_t bytes, done; int peer; bool is_send; };
thread_local int group_depth = 0;
thread_local std::vector<Transfer> transfers;

// Copy what can be copied of one transfer; whether anything was.
bool advance(Transfer& one) {
  Comm& c = *one.comm;
  Ring& ring = one.is_send ? c.rings[c.rank * c.size + one.peer] : c.rings[one.peer * c.size + c.rank];
  size_t written = ring.written, read = ring.read;
  size_t room = one.is_send ? RING - (written - read) : written - read, count = std::min(one.bytes - one.done, room);
  for (size_t i = 0; i < count;) {
    size_t at = ((one.is_send ? written : read) + i) % RING, part = std::min(count - i, RING - at);
    char *here = one.data + one.done + i, *there = ring.data + at;
    memcpy(one.is_send ? there : here, one.is_send ? here : there, part);
    i += part;
  }
  one.done += count;
  (one.is_send ? ring.written : ring.read) += count;
  return count > 0;
}

int finish_transfers() {
  for (int times = 0;;) {
    bool is_done = true, has_moved = false;
    std::set<std::pair<Comm*, int>> busy;  // two between the same ranks go one after the other
    for (auto& one : transfers) {
      if (one.done == one.bytes) continue;
      is_done = false;
      if (busy.insert({one.comm, 2 * one.peer + one.is_send}).second) has_moved |= advance(one);
    }
    if (is_done) break;
    if (!has_moved) pause_briefly(times);
  }
  transfers.clear();
  return SUCCESS;
}

int transfer(Comm* comm, void* data, size_t bytes, int peer, bool is_send) {
  transfers.push_back({comm, (char*)data, bytes, 0, peer, is_send});
  return group_depth ? SUCCESS : finish_transfers();
}
}  // namespace

extern "C" {
int ncclGetVersion(int* version) { *version = VERSION; return SUCCESS; }
const char* ncclGetErrorString(int) { return "fake NCCL"; }
const char* ncclGetLastError(Comm*) { return "fake NCCL"; }
int ncclGetUniqueId(UniqueId* id) {
  memset(id, 0, sizeof *id);
  FILE* random = fopen("/dev/urandom", "r");
  size_t read = fread(id, 1, 8, random);
  fclose(random);
  return read == 8 ? SUCCESS : 1;
}
int ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, void*) {
  uint64_t number;
  memcpy(&number, &id, 8);
  *comm = new Comm(number, size, rank);
  return SUCCESS;
}
int ncclCommInitRank(Comm** comm, int size, UniqueId id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, nullptr); }
int ncclCommInitRankScalable(Comm** comm, int size, int rank, int, UniqueId* id, void*) {
  return ncclCommInitRankConfig(comm, size, *id, rank, nullptr);
}
int ncclCommSplit(Comm* parent, int color, int key, Comm** comm, void*) {
  int mine[2] = {color, key};
  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  parent->exchange(mine, sizeof mine, [&](size_t, size_t) {
    for (int rank = 0; rank < parent->size; rank++) {
      const int* other = (const int*)parent->slot(rank);
      if (other[0] == color) members.push_back({other[1], rank});
    }
  });
  uint64_t id = (parent->id * 1000003u + ++parent->num_splits) * 1000003u + color + 17;
  std::sort(members.begin(), members.end());
  auto self = std::find_if(members.begin(), members.end(), [&](auto& one) { return one.second == parent->rank; });
  *comm = color < 0 ? nullptr : new Comm(id, members.size(), self - members.begin());
  return SUCCESS;
}
int ncclCommCount(const Comm* comm, int* size) { *size = comm->size; return SUCCESS; }
int ncclCommUserRank(const Comm* comm, int* rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommGetAsyncError(Comm*, int* error) { *error = SUCCESS; return SUCCESS; }
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int, Comm*) {
  *op = FIRST_SCALED + scales.size();
  scales[*op] = type == FLOAT64   ? *(double*)scalar
                : type == FLOAT32 ? *(float*)scalar
                : type == FLOAT16 ? (float)*(_Float16*)scalar
                                  : (float)*(BFloat16*)scalar;
  return SUCCESS;
}
int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, void*) {
  size_t wide = width(type);
  return comm->exchange(in, count * wide, [&](size_t begin, size_t bytes) {
    reduce(*comm, 0, (char*)out + begin, bytes / wide, type, op);
  });
}
int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, void*) {
  size_t wide = width(type);
  return comm->exchange(in, count * wide, [&](size_t begin, size_t bytes) {
    if (comm->rank == root) reduce(*comm, 0, (char*)out + begin, bytes / wide, type, op);
  });
}
int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, void*) {
  size_t wide = width(type), first = comm->rank * count * wide, last = first + count * wide;
  std::vector<char> result(count * wide);  // `out` may be a part of `in`
  comm->exchange(in, count * wide * comm->size, [&](size_t begin, size_t bytes) {
    size_t from = std::max(begin, first), to = std::min(begin + bytes, last);
    if (from < to) reduce(*comm, from - begin, result.data() + (from - first), (to - from) / wide, type, op);
  });
  memcpy(out, result.data(), result.size());
  return SUCCESS;
}
int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, void*) {
  size_t bytes = count * width(type);
  std::vector<char> input((const char*)in, (const char*)in + bytes);  // `in` may be a part of `out`
  return comm->exchange(input.data(), bytes, [&](size_t begin, size_t part) {
    for (int rank = 0; rank < comm->size; rank++) memcpy((char*)out + rank * bytes + begin, comm->slot(rank), part);
  });
}
int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, void*) {
  return comm->exchange(comm->rank == root ? in : nullptr, count * width(type), [&](size_t begin, size_t part) {
    memcpy((char*)out + begin, comm->slot(root), part);
  });
}
int ncclBcast(void* data, size_t count, int type, int root, Comm* comm, void* stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
int ncclGroupStart() { group_depth++; return SUCCESS; }
int ncclGroupEnd() { return --group_depth ? SUCCESS : finish_transfers(); }
int ncclSend(const void* data, size_t count, int type, int peer, Comm* comm, void*) {
  return transfer(comm, (void*)data, count * width(type), peer, true);
}
int ncclRecv(void* data, size_t count, int type, int peer, Comm* comm, void*) {
  return transfer(comm, data, count * width(type), peer, false);
}
int ncclAlltoAll(const void* in, void* out, size_t count, int type, Comm* comm, void* stream) {
  ncclGroupStart();
  for (int rank = 0; rank < comm->size; rank++) {
    ncclSend((const char*)in + rank * count * width(type), count, type, rank, comm, stream);
    ncclRecv((char*)out + rank * count * width(type), count, type, rank, comm, stream);
  }
  return ncclGroupEnd();
}
}
