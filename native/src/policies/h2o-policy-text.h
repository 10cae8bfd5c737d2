// A policy as its text: the name and all parameters, such as `h2o-far:near=64,half_life=384`. It is what pyh2o/policies calls
// the full text of a policy. There are no defaults here, they are a matter of Python.

#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

// A text that no policy can be made of; what() says why.
struct llama_h2o_policy_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Hands out the parameters one by one and notes what was read. All functions throw llama_h2o_policy_error: the text is
// ill-formed, a parameter is missing, of the wrong kind or out of its limits, or nobody asked for it.
class llama_h2o_policy_text {
public:
    explicit llama_h2o_policy_text(const std::string & text);

    const std::string & name() const { return own_name; }

    uint32_t count(const char * parameter, uint32_t least);
    double number(const char * parameter, double least);

    // a limit that only one policy has
    void require(bool fits, const char * parameter) const;

    // The same for every spelling of a policy. All parameters have to be read.
    std::string canonical() const;

private:
    std::string own_name;
    std::map<std::string, std::string> unread; // values by parameter
    std::string noted;

    std::string take(const char * parameter);
    void note(const char * parameter, const std::string & value);

    [[noreturn]] void fail(const std::string & what) const;
};
