#include "policies/h2o-policy-text.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <locale>
#include <sstream>

// positions have 32 bits
static constexpr uint64_t MAX_COUNT = std::numeric_limits<int32_t>::max();

//
// numbers, whatever the locale of the process
//

template <typename T>
static bool read_number(const std::string & text, T & value) {
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    in >> std::noskipws >> value;

    return !in.fail() && in.peek() == std::istringstream::traits_type::eof();
}

template <typename F>
static std::string write_number(double value, F format, int precision) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out << format << std::setprecision(precision) << value;

    return out.str();
}

// The fewest digits that give the same number, laid out as Python does.
static std::string write_number(double value) {
    int n_digits = 0;
    double same  = 0.0;
    std::string text;
    do {
        text = write_number(value, std::scientific, n_digits++);
    } while (read_number(text, same) && same != value);

    int exponent = 0;
    read_number(text.substr(text.find('e') + 1), exponent);

    const bool plain = exponent >= -4 && exponent < 16;

    return plain ? write_number(value, std::fixed, std::max(0, n_digits - 1 - exponent)) : text;
}

//
// the text
//

llama_h2o_policy_text::llama_h2o_policy_text(const std::string & text) {
    const size_t colon = text.find(':');

    own_name = text.substr(0, colon);

    for (size_t begin = colon; begin != std::string::npos;) {
        const size_t end = text.find(',', begin + 1);

        const std::string assignment = text.substr(begin + 1, end - begin - 1);
        const size_t equals          = assignment.find('=');
        if (equals == std::string::npos) {
            fail("'" + assignment + "' gives no parameter a value");
        }

        const std::string parameter = assignment.substr(0, equals);
        if (!unread.emplace(parameter, assignment.substr(equals + 1)).second) {
            fail(parameter + " is given twice");
        }

        begin = end;
    }
}

uint32_t llama_h2o_policy_text::count(const char * parameter, uint32_t least) {
    const std::string text = take(parameter);

    // streams read a minus sign as well
    uint64_t value    = 0;
    const bool digits = text.find_first_not_of("0123456789") == std::string::npos;
    require(digits && read_number(text, value) && value >= least && value <= MAX_COUNT, parameter);

    note(parameter, std::to_string(value));

    return uint32_t(value);
}

double llama_h2o_policy_text::number(const char * parameter, double least) {
    double value = 0.0;
    require(read_number(take(parameter), value) && std::isfinite(value) && value >= least, parameter);

    note(parameter, write_number(value));

    return value;
}

void llama_h2o_policy_text::require(bool fits, const char * parameter) const {
    if (!fits) {
        fail(std::string(parameter) + " has a value that is out of its limits");
    }
}

std::string llama_h2o_policy_text::canonical() const {
    if (!unread.empty()) {
        fail("it has no parameter " + unread.begin()->first);
    }

    return own_name + noted;
}

std::string llama_h2o_policy_text::take(const char * parameter) {
    const auto it = unread.find(parameter);
    if (it == unread.end()) {
        fail(std::string(parameter) + " is missing");
    }

    std::string value = it->second;
    unread.erase(it);

    return value;
}

void llama_h2o_policy_text::note(const char * parameter, const std::string & value) {
    noted += (noted.empty() ? ":" : ",") + std::string(parameter) + "=" + value;
}

void llama_h2o_policy_text::fail(const std::string & what) const {
    throw llama_h2o_policy_error("policy " + own_name + ": " + what);
}
