static const char* SN[4] = {"qkv", "o", "gate_up", "down"};
static int timing(int argc, char** argv) {
  if (std::string(argv[1]) == "gu") { Tune t{}; Model m; m.init(m8); m.adapters(16, 64); int T = atoi(argv[2]), n = atoi(argv[3]), s0 = atoi(argv[4]); m.route(T, n); for (int i = 0; i < 3; i++) { m.launch(s0, i, T, true, t); CK(cudaStreamSynchronize(st)); } printf("single launches ok\n"); for (int k = 0; k < 5; k++) printf("%.2f\n", m.single(s0, T, true, t)); return 0; }
  bool lt = lt_init(); Tune t{};
  double hbm; { uint4* big; size_t n = (size_t)4 << 30; CK(cudaMalloc(&big, n)); CK(cudaMemset(big, 1, n)); double best = 1e9; for (int bl : {132 * 4, 132 * 8, 132 * 16}) best = std::min(best, bench(1, [&](int) { k_read<<<bl, 256, 0, st>>>(big, n / 16, (uint32_t*)big); return true; })); hbm = n / best * 1e-6; printf("HBM read %.3f TB/s\n", hbm); CK(cudaFree(big)); }
  Tune q[4] = {t, t, t, t};
  for (int big : {0, 1}) { if (std::string(argv[1]) == "time8" && big) break; Model m; m.init(big ? m32 : m8); printf("=== %s: us (%% of the read rate)\n", big ? "Qwen3-32B" : "Qwen3-8B");
    double bytes = 0; for (auto& h : m.sh) bytes += 2.0 * h.N() * h.K;
    auto pc = [&](int s, double u) { return 2.0 * m.sh[s].N() * m.sh[s].K / u * 1e-6 / hbm * 100; };
    for (int r : {16, 64}) { m.adapters(r, 64);
      if (r == 16) for (int s = 0; s < 4; s++) { printf("%-8s", SN[s]); for (int T : {1, 8, 16, 64}) { m.route(T, std::min(T, 8)); double u = lt ? m.lt_single(s, T) : 1, b = m.single(s, T, false, t), l = m.single(s, T, true, t); printf(" | T%d lt %.1f (%.0f) base %.1f (%.0f) r16x%d %.1f", T, u, pc(s, u), b, pc(s, b), std::min(T, 8), l); } printf("\n"); }
      else { m.route(8, 8); printf("r64 x8:"); for (int s = 0; s < 4; s++) printf(" %s %.2f -> %.2f", SN[s], m.single(s, 8, false, t), m.single(s, 8, true, t)); printf("\n"); }
      for (auto tn : std::vector<std::pair<int, int>>{{1, 1}, {8, 1}, {8, 8}, {16, 8}, {16, 16}, {32, 8}, {64, 8}, {64, 64}}) { int T = tn.first, n = tn.second; m.route(T, n); if (T == 32) for (int s = 0; s < 4 && r == 16; s++) m.lt_single(s, 32); double l = lt ? m.lt_chain(T) : -1, b = m.chain(T, false, q), d = m.chain(T, true, q); double by = bytes / hbm * 1e-6; double ab = 0; for (auto& h : m.sh) { ab += 2.0 * r * n * (h.out.size() * h.K + h.N()); }
        printf("%s r%d %2d/%-2d: cublasLt %.1f base %.1f (%.3f) lora %.1f (%.3f)  bytes %.1f %.1f\n", big ? "32B" : "8B", r, T, n, l, b, b / l, d, d / l, by, by + ab / hbm * 1e-6); } }
    for (auto p : m.mem) CK(cudaFree(p)); }
  return 0;
}
