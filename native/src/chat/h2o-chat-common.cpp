// Replaces the parts of llama.cpp's common.cpp and log.cpp that its chat parsers use: the originals depend on samplers and
// downloads, and start a thread. Nothing is logged, because errors are returned as text.

#include "common.h"
#include "log.h"

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string joined;
    for (size_t i = 0; i < values.size(); ++i) {
        joined += (i ? separator : "") + values[i];
    }

    return joined;
}

std::vector<std::string> string_split(const std::string & str, const std::string & delimiter) {
    std::vector<std::string> parts;
    size_t begin = 0;
    for (size_t end; (end = str.find(delimiter, begin)) != std::string::npos; begin = end + delimiter.size()) {
        parts.push_back(str.substr(begin, end - begin));
    }
    parts.push_back(str.substr(begin));

    return parts;
}

std::string string_repeat(const std::string & str, size_t n) {
    std::string repeated;
    for (; n > 0; --n) {
        repeated += str;
    }

    return repeated;
}

void string_replace_all(std::string & s, const std::string & search, const std::string & replace) {
    if (search.empty()) {
        return;
    }
    for (size_t at = 0; (at = s.find(search, at)) != std::string::npos; at += replace.size()) {
        s.replace(at, search.size(), replace);
    }
}

// Not needed, because there is no vocabulary: templates are passed as text.
std::vector<llama_token> common_tokenize(const llama_vocab *, const std::string &, bool, bool) {
    return {};
}

std::string common_token_to_piece(const llama_vocab *, llama_token, bool) {
    return {};
}

int common_log_get_verbosity_thold(void) {
    return LOG_LEVEL_OUTPUT - 1;
}

common_log * common_log_main() {
    return nullptr;
}

void common_log_add(common_log *, ggml_log_level, const char *, ...) {}
