// Package secret has texts that nobody prints by mistake.
package secret

import (
	"fmt"
	"io"
	"unique"
)

// Text is a secret. Whatever prints or encodes it, or what it is part of, has nothing that tells of it: only Reveal does. Equal ones are ==. The zero value is the empty
// text, which is no secret.
//
// The text is behind a pointer: what fmt prints without asking for methods (fields that are not exported, verbs that do not fit) is where it points to.
type Text struct{ text unique.Handle[string] }

// Of makes a text a secret.
func Of(text string) Text {
	if text == "" {
		return Text{}
	}
	return Text{unique.Make(text)}
}

// Reveal returns the text.
func (t Text) Reveal() string {
	if t == (Text{}) {
		return ""
	}
	return t.text.Value()
}

// Format has every verb print the same.
func (t Text) Format(f fmt.State, _ rune) {
	if t == (Text{}) {
		_, _ = io.WriteString(f, "no secret")
	} else {
		_, _ = io.WriteString(f, "a secret")
	}
}

// MarshalText has encoders write the same.
func (t Text) MarshalText() ([]byte, error) { return fmt.Append(nil, t), nil }
