package secret_test

import (
	"bytes"
	"encoding/gob"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/secret"
)

const text = "DHHC-1:00:correct horse battery staple"

func TestText(t *testing.T) {
	one := secret.Of(text)
	if one.Reveal() != text || one != secret.Of(strings.Clone(text)) || one == secret.Of("another") || one == (secret.Text{}) {
		t.Error("it is not the text that it was made of")
	}
	if none := secret.Of(""); none != (secret.Text{}) || none.Reveal() != "" || fmt.Sprint(none) != "no secret" {
		t.Errorf("of nothing it is %v", none)
	}
}

// parts returns values that contain a secret in all possible ways.
func parts() map[string]any {
	one := secret.Of(text)
	type hidden struct{ text secret.Text }
	type shown struct{ Text secret.Text }
	type embedding struct{ secret.Text }
	return map[string]any{
		"itself": one, "a pointer": &one, "a field": shown{one}, "a pointer to a field": &shown{one}, "a field that is not exported": hidden{one},
		"a pointer to that": &hidden{one}, "deep": []any{map[string]any{"a": []hidden{{one}}}}, "a list": []secret.Text{one}, "a map": map[string]secret.Text{"a": one},
		"keys of a map": map[secret.Text]int{one: 1}, "embedded": embedding{one}, "an error": fmt.Errorf("%w: %v", errors.New("wrong"), hidden{one}),
	}
}

// TestPrinted: no verb of fmt, with any flags and in any value, prints a secret, and no encoder or logger does.
func TestPrinted(t *testing.T) {
	tells := func(what, said string) {
		t.Helper()
		plain := strings.ToLower(said)
		for _, form := range []string{text, "horse", hex.EncodeToString([]byte("horse")), "104 111 114 115 101", "0x68, 0x6f", "68 6f 72 73 65", "'h' 'o' 'r'", "aG9yc2U"} {
			if strings.Contains(plain, strings.ToLower(form)) {
				t.Errorf("%s: %q", what, said)
			}
		}
	}
	for where, value := range parts() {
		for verb := ' '; verb <= '~'; verb++ {
			for _, flags := range []string{"", "+", "#", "-", " ", "0", "+#", "# ", "40", ".3", "40.3", "[1]"} {
				format := "%" + flags + string(verb)
				tells(where+" by "+format, fmt.Sprintf(format, value))
			}
		}
		tells(where+" by Sprint", fmt.Sprint(value)+fmt.Sprintln(value, value))
		written, err := json.Marshal(value)
		tells(where+" as JSON", string(written)+fmt.Sprint(err))
		written, err = xml.Marshal(value)
		tells(where+" as XML", string(written)+fmt.Sprint(err))
		var logged bytes.Buffer
		err = gob.NewEncoder(&logged).Encode(value)
		tells(where+" as gob", logged.String()+fmt.Sprint(err))
		for _, handler := range []slog.Handler{slog.NewTextHandler(&logged, nil), slog.NewJSONHandler(&logged, nil)} {
			slog.New(handler).Info("a message", "value", value, slog.Any("any", value))
		}
		klog.LogToStderr(false)
		klog.SetOutput(&logged)
		klog.Background().Info("a message", "value", value)
		klog.Infof("%v", value)
		klog.Flush()
		klog.LogToStderr(true)
		if logged.Len() == 0 || !strings.Contains(logged.String(), "a message") {
			t.Fatalf("nothing was logged: %q", logged.String())
		}
		tells(where+" in a log", logged.String())
	}
	var again struct{ Text secret.Text }
	if err := json.Unmarshal([]byte(`{"Text": "`+text+`"}`), &again); err == nil {
		t.Error("it is read from what writes it otherwise")
	}
	check.OK(t, second(json.Marshal(secret.Of(text))))
}

func second[T any](_ T, err error) error { return err }
