package cli

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"

	"sigs.k8s.io/yaml"
)

// encode prints a value as -o json or -o yaml. Who reads it has each text as it is, and a terminal
// that shows it is given no commands: what is not printable (Line) is written as an escape.
func encode(to io.Writer, as format, value any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	err := e.Encode(value)
	if err != nil {
		return err
	}
	out := text.Bytes()
	if as == "yaml" {
		out, err = yamlOf(out)
	} else {
		out = escaped(out, func(r rune) string {
			high, low := utf16.EncodeRune(r)
			return fmt.Sprintf(`\u%04x\u%04x`, high, low)
		})
	}
	if err == nil {
		_, err = to.Write(out)
	}
	return err
}

// escaped is JSON whose texts have escapes for what is not printable: JSON itself asks for those of few characters. large is the
// escape of a character that \u has no room for.
func escaped(text []byte, large func(rune) string) []byte {
	var out bytes.Buffer
	for _, r := range string(text) {
		switch {
		case r == '\n' || unicode.IsPrint(r): // lines end between texts only
			out.WriteRune(r)
		case r > 0xffff:
			out.WriteString(large(r))
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.Bytes()
}

// jsonString is a text in JSON.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// yamlOf is JSON as YAML. The library writes some of what is not printable as it is, so for texts that have any a word is in their
// place until the rest is written. As JSON writes a text, so may YAML.
func yamlOf(text []byte) ([]byte, error) {
	word := rand.Text()
	var texts []string // each after its word
	text = jsonString.ReplaceAllFunc(text, func(one []byte) []byte {
		shown := escaped(one, func(r rune) string { return fmt.Sprintf(`\U%08x`, r) })
		if bytes.Equal(shown, one) {
			return one
		}
		own := fmt.Sprintf("%s-%d-", word, len(texts))
		texts = append(texts, own, string(shown))
		return []byte(`"` + own + `"`)
	})
	out, err := yaml.JSONToYAML(text)
	return []byte(strings.NewReplacer(texts...).Replace(string(out))), err
}
