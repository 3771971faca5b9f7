package port

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
)

// api asks the API server what both sides of a call need to know.
type api struct {
	authentication authenticationclient.AuthenticationV1Interface
	core           coreclient.CoreV1Interface
}

func connect(config *rest.Config) (*api, error) {
	config = rest.CopyConfig(config)
	config.QPS = -1 // with client-go's usual limit of five a second, a caller with invented tokens would keep out all others
	authentication, err := authenticationclient.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	core, err := coreclient.NewForConfig(config)
	return &api{authentication, core}, err
}

// review asks whose token one is.
func (a *api) review(ctx context.Context, spec authenticationv1.TokenReviewSpec) (authenticationv1.TokenReviewStatus, error) {
	review, err := a.authentication.TokenReviews().Create(ctx, &authenticationv1.TokenReview{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.TokenReviewStatus{}, err
	}
	return review.Status, nil
}

// self is the service account and the pod of this process, as the API server knows them by the token of the request.
type self struct {
	namespace, account string
	pod                *authenticationv1.BoundObjectReference
}

func (a *api) self(ctx context.Context) (self, error) {
	review, err := a.authentication.SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return self{}, err
	}
	user := review.Status.UserInfo
	// system:serviceaccount:NAMESPACE:ACCOUNT
	parts := strings.Split(user.Username, ":")
	extra := func(key string) string { return strings.Join(user.Extra["authentication.kubernetes.io/"+key], "") }
	pod := &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: extra("pod-name"), UID: types.UID(extra("pod-uid"))}
	if len(parts) != 4 || parts[1] != "serviceaccount" || pod.Name == "" {
		return self{}, fmt.Errorf("to the API server this is the user %q, and no pod: agents let in pods of the driver's service account only", user.Username)
	}
	return self{parts[2], parts[3], pod}, nil
}

// plausible returns an error unless a token says that it is for an audience (RFC 7519, aud). It does not check the signature: the API server does.
func plausible(token, audience string) error {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return errors.New("that is no token of a service account")
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return errors.New("that is no token of a service account")
	}
	var claims struct {
		Audiences []string `json:"aud"`
	}
	if err := json.Unmarshal(text, &claims); err != nil || !slices.Contains(claims.Audiences, audience) {
		return fmt.Errorf("the token is for the audience %q, and not for %s", claims.Audiences, audience)
	}
	return nil
}
