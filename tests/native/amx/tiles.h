// AMX on processors without it: what its instructions do, done by a handler of SIGILL. One thread only.
// The encodings and operations are those of Intel's Software Developer's Manual, volume 2.

#pragma once

#include <sys/syscall.h>
#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace tiles {

constexpr int WRONG = 70; // the exit code where a processor would fault

struct config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t n_bytes[8]; // of a row of each tile
    uint8_t reserved_1[16];
    uint8_t n_rows[8];
    uint8_t reserved_2[8];
};
static_assert(sizeof(config) == 64, "what ldtilecfg reads");

struct tile {
    uint8_t rows[16][64];
};

inline config now;
inline tile all[8];

[[noreturn]] inline void fault(const char * why) {
    std::fprintf(stderr, "%s\n", why);
    _exit(WRONG);
}

inline void check_config(const config & c) {
    static const uint8_t zero[16] = {};

    bool good = c.palette == 1 && c.start_row == 0 && !std::memcmp(c.reserved, zero, sizeof(c.reserved)) &&
                !std::memcmp(c.reserved_1, zero, sizeof(c.reserved_1)) &&
                !std::memcmp(c.reserved_2, zero, sizeof(c.reserved_2));
    for (int i = 0; i < 8; ++i) {
        good = good && c.n_bytes[i] <= 64 && c.n_rows[i] <= 16 && !c.n_bytes[i] == !c.n_rows[i];
    }
    if (!good) {
        fault("ldtilecfg: the configuration of the tiles is rubbish");
    }
}

inline void check_tile(int i) {
    if (i >= 8 || now.palette != 1 || now.n_rows[i] == 0) {
        fault("a tile that is not configured is used");
    }
}

inline int extended(uint8_t x, bool is_signed) {
    return is_signed ? int8_t(x) : x;
}

// c += a * b: 32-bit sums of four products of bytes
inline void multiply(int c, int a, int b, bool a_is_signed, bool b_is_signed) {
    check_tile(c);
    check_tile(a);
    check_tile(b);
    if (now.n_bytes[c] != now.n_bytes[b] || now.n_rows[c] != now.n_rows[a] || now.n_bytes[a] / 4 != now.n_rows[b]) {
        fault("tiles whose sizes do not go together are multiplied");
    }
    for (int m = 0; m < now.n_rows[c]; ++m) {
        for (int n = 0; n < now.n_bytes[c] / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, &all[c].rows[m][4 * n], 4);
            for (int k = 0; k < now.n_bytes[a]; ++k) {
                sum += extended(all[a].rows[m][k], a_is_signed) *
                       extended(all[b].rows[k / 4][4 * n + k % 4], b_is_signed);
            }
            std::memcpy(&all[c].rows[m][4 * n], &sum, 4);
        }
    }
}

struct instruction {
    uint8_t opcode;
    uint8_t prefix; // 0: none, 1: 66, 2: F3, 3: F2
    uint8_t modrm;
    uint8_t vvvv;
    int reg;
    int rm;
    char * address; // of the operand in memory
    int64_t stride; // what the index register makes of it
    int size;

    bool is_memory() const { return modrm >> 6 != 3; }
};

inline uint64_t value_of(const greg_t * regs, int i) {
    static const int ORDER[16] = { REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8,
        REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15 };

    return uint64_t(regs[ORDER[i]]);
}

inline instruction decode(const uint8_t * p, const greg_t * regs) {
    const bool is_vex = p[0] == 0xC4 && (p[1] & 31) == 2 && !(p[2] & 0x84);
    if (!is_vex) {
        fault("an instruction that neither the processor nor this file knows");
    }

    instruction res = {};

    res.opcode = p[3];
    res.prefix = p[2] & 3;
    res.vvvv   = ~p[2] >> 3 & 15;
    res.modrm  = p[4];
    res.reg    = (p[4] >> 3 & 7) | (p[1] & 0x80 ? 0 : 8);
    res.rm     = (p[4] & 7) | (p[1] & 0x20 ? 0 : 8);
    res.size   = 5;
    if (!res.is_memory()) {
        return res;
    }

    const int mod    = p[4] >> 6;
    uint64_t address = 0;
    bool has_base    = true;
    if ((p[4] & 7) == 4) {
        const uint8_t sib = p[res.size++];
        const int index   = (sib >> 3 & 7) | (p[1] & 0x40 ? 0 : 8);
        const int base    = (sib & 7) | (p[1] & 0x20 ? 0 : 8);

        res.stride = index == 4 ? 0 : int64_t(value_of(regs, index) << (sib >> 6));
        has_base   = (sib & 7) != 5 || mod != 0;
        address    = has_base ? value_of(regs, base) : 0;
    } else if ((p[4] & 7) == 5 && mod == 0) {
        address = uint64_t(p) + res.size + 4; // from the next instruction on
    } else {
        address = value_of(regs, res.rm);
    }

    if (mod == 1) {
        address += int64_t(int8_t(p[res.size++]));
    } else if (mod == 2 || !has_base || ((p[4] & 7) == 5 && mod == 0)) {
        int32_t far;
        std::memcpy(&far, p + res.size, 4);
        address  += int64_t(far);
        res.size += 4;
    }
    res.address = reinterpret_cast<char *>(address);

    return res;
}

inline void configure(const instruction & in) {
    if (!in.is_memory()) {
        if (in.prefix == 3) {
            check_tile(in.reg);
            all[in.reg] = {};
        } else {
            now = {};
        }
    } else if (in.prefix == 1) {
        std::memcpy(in.address + in.stride, &now, sizeof(now));
    } else {
        std::memcpy(&now, in.address + in.stride, sizeof(now));
        check_config(now);
    }
}

inline void move(const instruction & in) {
    check_tile(in.reg);
    if (in.prefix != 2) {
        all[in.reg] = {};
    }
    for (int row = 0; row < now.n_rows[in.reg]; ++row) {
        char * there   = in.address + row * in.stride;
        uint8_t * here = all[in.reg].rows[row];
        if (in.prefix == 2) {
            std::memcpy(there, here, now.n_bytes[in.reg]);
        } else {
            std::memcpy(here, there, now.n_bytes[in.reg]);
        }
    }
}

inline void run_one(int, siginfo_t *, void * context) {
    greg_t * regs = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;

    const instruction in = decode(reinterpret_cast<const uint8_t *>(regs[REG_RIP]), regs);
    switch (in.opcode) {
        case 0x49:
            configure(in);
            break;
        case 0x4B:
            move(in);
            break;
        case 0x5E:
            multiply(in.reg, in.rm, in.vvvv, in.prefix >= 2, in.prefix % 2 == 1);
            break;
        default:
            fault("an instruction that neither the processor nor this file knows");
    }
    regs[REG_RIP] += in.size;
}

// Where the processor and the system have no AMX.
inline void install_if_needed() {
    constexpr int REQUEST_PERMISSION = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr int TILE_DATA          = 18;

    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) {
        return;
    }

    struct sigaction action = {};

    action.sa_sigaction = run_one;
    action.sa_flags     = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

} // namespace tiles
