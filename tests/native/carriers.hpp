/// Carries the payloads of staged links from process to process over sockets, as
/// zbpipe/runtime/bridge.py does.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/staging.hpp"

namespace zb {

/// A connection for each (from, to), made before processes fork.
class Wires {
 public:
  void add(int from, int to) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("socketpair");
    ends_[{from, to}] = {ends[0], ends[1]};
  }
  int out(int from, int to) const { return ends_.at({from, to}).first; }
  int in(int from, int to) const { return ends_.at({from, to}).second; }

 private:
  std::map<std::pair<int, int>, std::pair<int, int>> ends_;
};

class Carriers {
 public:
  void carry(std::shared_ptr<cuda::Departures> departures, int wire) {
    wires_.push_back(wire);
    departures_.push_back(departures);
    threads_.emplace_back([this, departures, wire] {
      while (!departures->finished()) {
        auto parcel = departures->take(kLook);
        if (ended_) return;
        if (!parcel) continue;
        if (!put(wire, &parcel->slot, sizeof(int)) || !put(wire, &parcel->bytes, sizeof(size_t)) ||
            !put(wire, parcel->data, parcel->bytes))
          return;
        departures->done(parcel->slot);
      }
      shutdown(wire, SHUT_WR);
    });
  }

  void bring(std::shared_ptr<cuda::Arrivals> arrivals, int wire) {
    wires_.push_back(wire);
    arrivals_.push_back(arrivals);
    threads_.emplace_back([this, arrivals, wire] {
      int slot;
      size_t bytes;
      while (get(wire, &slot, sizeof(slot)) && get(wire, &bytes, sizeof(bytes))) {
        std::optional<Parcel> parcel;
        while (!(parcel = arrivals->room(slot, 0, bytes, bytes, kLook)))
          if (ended_) return;
        if (!get(wire, parcel->data, parcel->bytes)) return;
        arrivals->commit(*parcel);
      }
    });
  }

  /// No more will be sent. In order all that was is carried first; else whoever waits is woken.
  void finish(bool in_order) {
    ended_ = !in_order;
    for (auto& one : departures_) one->finish();
    if (!in_order) {
      for (int wire : wires_) shutdown(wire, SHUT_RDWR);
      for (auto& one : arrivals_) one->finish();
    }
  }

  /// When all peers have finished.
  void join() {
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  static constexpr int64_t kLook = 50'000'000;

  static bool put(int wire, const void* data, size_t bytes) {
    auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      ssize_t sent = send(wire, at, bytes, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += sent;
      bytes -= static_cast<size_t>(sent);
    }
    return true;
  }
  static bool get(int wire, void* data, size_t bytes) {
    return bytes == 0 || recv(wire, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
  }

  std::atomic<bool> ended_{false};
  std::vector<int> wires_;
  std::vector<std::shared_ptr<cuda::Departures>> departures_;
  std::vector<std::shared_ptr<cuda::Arrivals>> arrivals_;
  std::vector<std::thread> threads_;
};

}  // namespace zb
