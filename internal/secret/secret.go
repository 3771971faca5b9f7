// Package secret has a type for secrets, which keeps them from being printed by mistake.
package secret

import (
	"fmt"
	"io"
	"unique"
)

// Text is a secret. Printing or encoding it, or a value that contains it, does not show its text: only Reveal does. Equal secrets are ==. The zero value is the
// empty text, which is no secret.
//
// The text is behind a pointer, because fmt prints some values without asking for their methods (unexported fields, wrong verbs): then it prints the pointer.
type Text struct{ text unique.Handle[string] }

// Of returns a text as a secret.
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

// Format prints the same for every secret and verb.
func (t Text) Format(f fmt.State, _ rune) {
	if t == (Text{}) {
		_, _ = io.WriteString(f, "no secret")
	} else {
		_, _ = io.WriteString(f, "a secret")
	}
}

// MarshalText encodes every secret as Format prints it.
func (t Text) MarshalText() ([]byte, error) { return fmt.Append(nil, t), nil }
